"""Texts of experiments, made of the demo pairs' and of this Python's library."""

from __future__ import annotations

import json
import random
import string
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from sglang_dflash.bench import datasets
from sglang_dflash.bench.datasets import Prompt, stdlib_functions
from sglang_dflash.facts.embedded import demo_pair

# Bytes of a document of "unseen-long": 4,000 to 8,000 tokens of the `code` pair, which has 3.07
# bytes per token on its held-out files.
LONG_BYTES = (12_500, 24_500)
AGENTS, TURNS, SHARED_TURNS = 16, 5, 2
# A phase is this many requests: all easy, then all hard.
PHASE = 4


def load(name: str, count: int, pair: str) -> list[Prompt]:
    """`count` prompts, the same ones each time; all of them if there are fewer.

    Args:
        name: "agents" or "alternating", whose order is part of the workload; "unseen-long",
            "random", or a data set of `sglang-dflash bench`.
        pair: the embedded pair whose texts are "demo".
    """
    if name == "agents":
        return agents([prompt.turns[0] for prompt in stdlib_functions()])[:count]
    if name == "alternating":
        easy = [Prompt((text,), chat=False) for text in demo_pair(pair).prompts]
        return alternating(easy, stdlib_functions())[:count]
    if name == "unseen-long":
        return datasets.select(unseen_documents(), count, seed=0)
    if name == "random":
        return datasets.select(random_texts(), count, seed=0)
    return datasets.load(name, count, model=pair)


def unseen_documents() -> list[Prompt]:
    """Long documents: the modules that were held out of the `code` pair's training, one after the
    other in a fixed random order, cut at whole lines into pieces of `LONG_BYTES`."""
    root, rng = Path(sysconfig.get_path("stdlib")), random.Random(0)
    files = sorted({item["file"] for item in demo_pair("code").cut})
    rng.shuffle(files)
    found, lines, room = [], list[str](), rng.randrange(*LONG_BYTES)
    for file in files:
        for line in (root / file).read_text(encoding="utf-8").splitlines(keepends=True):
            if len(line) > room:
                found.append("".join(lines))
                lines, room = [], rng.randrange(*LONG_BYTES)
            lines.append(line)
            room -= len(line)
    return [Prompt((text,), chat=False) for text in found]


def agents(functions: Sequence[str]) -> list[Prompt]:
    """Sessions that read and answer in turns. All begin with the same list of tools; two at a time
    share their first turns and then go different ways. A turn's text is a tool's result.

    Args:
        functions: source texts, of which results are made. At least `AGENTS` of them.
    """
    rng = random.Random(0)
    tools = [{"tool": name, "arguments": ["path"]} for name in ("read", "search", "edit", "run")]
    header = "# tools\n" + "".join(f"{json.dumps(tool)}\n" for tool in tools)

    def results(count: int) -> list[str]:
        return [f"\n# result of read\n{text}" for text in rng.sample(functions, count)]

    found = []
    for _ in range(AGENTS // 2):
        trunk = results(SHARED_TURNS)
        for _ in range(2):
            first, *rest = trunk + results(TURNS - SHARED_TURNS)
            found.append(Prompt((header + first, *rest), chat=False))
    return found


def alternating(easy: Sequence[Prompt], hard: Sequence[Prompt]) -> list[Prompt]:
    """`PHASE` prompts of one kind, then as many of the other, as long as there are any of both."""
    found: list[Prompt] = []
    for i in range(0, min(len(easy), len(hard)) - PHASE + 1, PHASE):
        found += [*easy[i : i + PHASE], *hard[i : i + PHASE]]
    return found


def random_texts() -> list[Prompt]:
    """Letters, digits and marks, drawn evenly."""
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits + string.punctuation + " \n"
    return [Prompt(("".join(rng.choices(letters, k=200)),), chat=False) for _ in range(64)]
