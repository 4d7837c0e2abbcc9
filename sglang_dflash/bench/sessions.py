"""Workloads that are made: agents with shared prefixes, changing predictability, random text."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence

from sglang_dflash.bench.prompt import Prompt

AGENTS, TURNS, SHARED_TURNS = 16, 5, 2
# A phase is this many requests: all easy, then all hard.
PHASE = 4
RANDOM_TEXTS, RANDOM_CHARACTERS = 64, 200


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
    return [
        Prompt(("".join(rng.choices(letters, k=RANDOM_CHARACTERS)),), chat=False)
        for _ in range(RANDOM_TEXTS)
    ]
