"""Prompts by data set: embedded, from this Python's library, made up, from a file, or from the
hub."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import json
import os
import random
import string
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError, cut


class HubSet(NamedTuple):
    """A data set of the hub: its repository, and how to read the turns of a row."""

    repository: str
    config: str | None
    split: str
    turns: Callable[[dict[str, Any]], list[str]]


_MATH = "\n\nReason step by step, and put the final answer in \\boxed{}."

HUB = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", lambda row: [row["question"] + _MATH]),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + _MATH]),
    "humaneval": HubSet(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: [f"Complete this Python function.\n\n```python\n{row['prompt']}```"],
    ),
    "mbpp": HubSet(
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        lambda row: [
            f"{row['prompt']}\n\nThe code has to pass these tests:\n\n"
            + "\n".join(row["test_list"])
        ],
    ),
    "mt-bench": HubSet(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])
    ),
    "alpaca": HubSet(
        "tatsu-lab/alpaca",
        None,
        "train",
        lambda row: ["\n\n".join(filter(None, (row["instruction"], row["input"])))],
    ),
}
BUILT_IN = ("demo", "unseen", "unseen-long", "stdlib", "agents", "alternating", "random")
# Their order is part of the workload.
_ORDERED = ("agents", "alternating")
NAMES = (*BUILT_IN, *HUB)
# A count that no set reaches.
ALL = 10**9

# The library modules that the embedded pairs were not trained on: HELD_OUT of
# launch/demo_training/data.py.
HELD_OUT = ("colorsys", "heapq", "contextlib", "getopt", "json.decoder", "json.encoder")
_LEAST_LINES = 8
# Bytes of a document of "unseen-long": 4,000 to 8,000 tokens of the `code` pair, which has 3.07
# bytes per token on its held-out files.
LONG_BYTES = (12_500, 24_500)
AGENTS, TURNS, SHARED_TURNS = 16, 5, 2
# A phase is this many requests: all easy, then all hard.
PHASE = 4
RANDOM_TEXTS, RANDOM_CHARACTERS = 64, 200


def default_cache() -> Path:
    """Folder of fetched data sets."""
    from platformdirs import user_cache_path

    return user_cache_path("sglang-dflash", appauthor=False) / "datasets"


def check_name(name: str) -> None:
    """Raise ConfigError, with near matches, if there is no such data set."""
    if name in NAMES:
        return
    near = difflib.get_close_matches(name.lower().replace("_", "-"), NAMES)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    required = f"{meant}choose from {', '.join(NAMES)}, or give {{dataset_file}}"
    raise ConfigError("dataset", name, required)


def load(name: str, count: int, *, model: str | None, cache: Path, seed: int = 0) -> list[Prompt]:
    """`count` prompts of a set, the same ones for a seed; all of them if there are fewer.

    Raises:
        ConfigError: no such set, or it is not cached and cannot be fetched.
    """
    check_name(name)
    built_in: dict[str, Callable[[], list[Prompt]]] = {
        "demo": lambda: _texts(demo_pair(model or "dense").prompts),
        "unseen": lambda: _texts(demo_pair("code").prompts),
        "unseen-long": unseen_documents,
        "stdlib": stdlib_functions,
        "agents": lambda: agents([prompt.turns[0] for prompt in stdlib_functions()]),
        "alternating": lambda: alternating(
            _texts(demo_pair(model or "dense").prompts), stdlib_functions()
        ),
        "random": random_texts,
    }
    found = built_in[name]() if name in built_in else from_file(_cached(name, cache))
    return found[:count] if name in _ORDERED else select(found, count, seed)


def _texts(texts: Iterable[str]) -> list[Prompt]:
    return [Prompt((text,), chat=False) for text in texts]


def select(prompts: list[Prompt], count: int, seed: int = 0) -> list[Prompt]:
    """`count` of them, drawn with a seed, because sets are often ordered by kind."""
    return random.Random(seed).sample(prompts, min(count, len(prompts)))


def stdlib_functions() -> list[Prompt]:
    """The first half of every function of the held-out modules, to be continued."""
    found = []
    for module in HELD_OUT:
        source = inspect.getsource(importlib.import_module(module))
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            length = node.end_lineno - node.lineno + 1
            if length >= _LEAST_LINES:
                half = lines[node.lineno - 1 : node.lineno - 1 + length // 2]
                found.append(Prompt((textwrap.dedent("".join(half)),), chat=False))
    # Overloads for other Pythons begin alike.
    return list(dict.fromkeys(found))


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
    return _texts(found)


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


def from_file(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file.

    `{"prompt": TEXT}` is continued as it is, `{"turns": [TEXT, ...]}` goes through the chat
    template.

    Raises:
        ConfigError: no such file, or a line is neither.
    """
    if not path.is_file():
        raise ConfigError("dataset_file", str(path), "there is no such file")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            found.append(_parsed(line, number))
    if not found:
        raise ConfigError("dataset_file", str(path), "it holds no prompt")
    return found


def _parsed(line: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    row = row if isinstance(row, dict) else {}
    turns = row.get("turns", [row.get("prompt")])
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        required = '{"prompt": TEXT} or {"turns": [TEXT, ...]} in JSON is required'
        raise ConfigError("dataset_file", line[:60], f"line {number}: {required}")
    return Prompt(tuple(turns), chat="turns" in row)


def _cached(name: str, cache: Path) -> Path:
    """The set as JSONL in `cache`, fetched from the hub on first use."""
    path, of = cache / f"{name}.jsonl", HUB[name]
    if path.is_file():
        return path
    from datasets import load_dataset

    cache.mkdir(parents=True, exist_ok=True)
    # Under another name until it is complete; each process has its own.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        rows = load_dataset(of.repository, of.config, split=of.split)
        turns = rows.map(lambda row: {"turns": of.turns(row)}, remove_columns=rows.column_names)
        turns.to_json(partial, force_ascii=False)
        return partial.rename(path)
    # The hub, its client and the network raise many types; the way out is the same for all.
    except Exception as error:
        required = (
            f"it is not cached as {str(path)!r}, and {of.repository} could not be fetched "
            f"({cut(str(error))}); give {{dataset_file}}"
        )
        raise ConfigError("dataset", name, required) from error
    finally:
        partial.unlink(missing_ok=True)
