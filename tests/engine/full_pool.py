"""Requests that fill a pool of 256 tokens, or the context."""

from __future__ import annotations

import functools
from typing import Any

import requests

from sglang_dflash.bench.server import Server
from sglang_dflash.facts.embedded import demo_pair
from tests.engine import workload
from tests.engine.client import GREEDY, at_rest, together

POOL, CONTEXT, NEW = 256, 96, 26
Answers = list[dict[str, Any]]


def _sent(server: Server, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    """The answer, or the status of a refusal."""
    body = {"input_ids": prompt, "sampling_params": {**GREEDY, **sampling}}
    response = requests.post(f"{server.url}/generate", json=body, timeout=120)
    return response.json() if response.ok else {"status": response.status_code}


@functools.cache
def _prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair("dense").target)
    return [tokenizer.encode(text) for text in workload.prompts()["long"][:4]]


def _fill(server: Server, distances: range) -> Answers:
    """A prompt and an answer of that many tokens fewer than the pool has: ended by its length, then
    by a token at the same place. Then two requests at a time, which have as many together."""
    texts, answers = _prompts(), []
    for left in distances:
        prompt = texts[0][: POOL - left - NEW]
        answers.append(_sent(server, prompt, max_new_tokens=NEW))
        ids = answers[-1].get("output_ids", [])
        # The last token that is not in the answer before.
        ends = [token for k, token in enumerate(ids) if token not in ids[:k]][-1:]
        stop = {"stop_token_ids": ends, "ignore_eos": False}
        answers.append(_sent(server, prompt, max_new_tokens=POOL, **stop))
        first = 90 + 3 * left
        prompts = [texts[1][: first - NEW], texts[2][: POOL - left - first - NEW]]
        answers += together(lambda p=p: _sent(server, p, max_new_tokens=NEW) for p in prompts)
        at_rest(server)
    return answers


def fills_context(server: Server) -> Answers:
    """A context of 96 tokens: answers of so many fewer, and one that is cut there."""
    prompt = _prompts()[3][:60]
    lengths = [1000, *(CONTEXT - len(prompt) - left for left in range(-1, 19))]
    return together(lambda n=n: _sent(server, prompt, max_new_tokens=n) for n in lengths)


def fills_pool(server: Server) -> Answers:
    return _fill(server, range(-1, 17, 2))


def fills_pool_often(server: Server) -> Answers:
    return _fill(server, range(-2, 36))
