"""Requests whose answers end inside a block, for one of two reasons, at token k or soon after."""

from __future__ import annotations

import functools
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine.client import GREEDY, ask

Answers = list[dict[str, Any]]
KINDS = ("string", "regex", "token", "length")
PAIRS = [(a, b) for a, b in itertools.product(KINDS, KINDS) if (a, b) != ("length", "length")]
# Further settings, in turn. A grammar allows what the target writes anyway.
ALSO: list[dict[str, Any]] = [
    {},
    {"no_stop_trim": True},
    {"min_new_tokens": 12},
    {"regex": r"(.|\n){5,55}"},
    {"ignore_eos": True},
]


@functools.cache
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_pair(name).target)


def condition(kind: str, tokenizer: Any, ids: list[int], at: int) -> dict[str, Any]:
    """Return sampling parameters that end the answer `ids` at its token `at`, or earlier."""
    # Of two tokens: one may be a part of a character.
    text = tokenizer.decode(ids[at - 1 : at + 1])
    found: dict[str, dict[str, Any]] = {
        "string": {"stop": [text]},
        "regex": {"stop_regex": [f"(?:{re.escape(text)})"]},
        "token": {"stop_token_ids": [ids[at]]},
        "length": {"max_new_tokens": at + 1},
    }
    return found[kind]


def both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    together = first | second
    for name in first.keys() & second.keys():
        together[name] = first[name] + second[name]
    return together


def _sent(server: Server, text: str, sampling: dict[str, Any], streamed: bool) -> dict[str, Any]:
    """The answer; streamed, its last chunk, after every other was a beginning of it."""
    body = {
        "text": text,
        "sampling_params": {**GREEDY, "max_new_tokens": 60, "ignore_eos": False, **sampling},
        "return_logprob": True,
        "stream": streamed,
    }
    with requests.post(f"{server.url}/generate", json=body, stream=streamed, timeout=120) as got:
        assert got.ok, got.text
        if not streamed:
            return got.json()
        lines = [line[6:] for line in got.iter_lines() if line.startswith(b"data: {")]
    *before, last = map(json.loads, lines)
    assert "output_ids" in last, (last, sampling)
    for chunk in before:
        assert last["output_ids"][: len(chunk["output_ids"])] == chunk["output_ids"]
    return last


def _ends(server: Server, name: str, times: int = 1, **sampling: Any) -> Answers:
    """Ask each of 4 texts `times` times with every pair of conditions, each first once."""
    tokenizer, jobs = _tokenizer(name), []
    for at, text in enumerate(demo_pair(name).prompts[:4]):
        seed = {"sampling_seed": 100 + at} if sampling else {}
        ids = ask(server, text, max_new_tokens=60, **sampling, **seed)["output_ids"]
        for i, kinds in enumerate(PAIRS * times):
            early = 12 + (7 * at + 5 * i) % 20
            places = zip(kinds, (early, early + 1 + i % 4), strict=True)
            made = [condition(kind, tokenizer, ids, k) for kind, k in places]
            given = both(*made) if i % 2 else both(*made[::-1])
            also = ALSO[(i + at) % len(ALSO)]
            jobs.append((text, {**sampling, **seed, **also, **given}, i % 3 == 0))
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda job: _sent(server, *job), jobs))


def ends(server: Server) -> Answers:
    """120 requests."""
    return _ends(server, "dense", times=2)


def once(answers: Answers) -> Answers:
    """Select those of `ends`'s answers that `ends_once` gives."""
    each = len(PAIRS)
    return [one for at in range(0, len(answers), 2 * each) for one in answers[at : at + each]]


def ends_once(server: Server) -> Answers:
    """Half of them."""
    return _ends(server, "dense")


def ends_hybrid(server: Server) -> Answers:
    return _ends(server, "hybrid")


def ends_seeded(server: Server) -> Answers:
    return _ends(server, "dense", temperature=0.7, top_k=50)
