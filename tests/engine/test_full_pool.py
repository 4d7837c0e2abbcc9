"""Our worker gives plain decoding's answers in a pool of 256 tokens: near the pool's end its steps
take the slots that are left. And an answer ends at the end of the context."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine import servers as s
from tests.engine import workload
from tests.engine.client import GREEDY, at_rest, together
from tests.engine.servers import Ask, ServerConfig

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


def cases() -> Iterator[Any]:
    for config in (*s.FULL.values(), s.FULL_NO_OVERLAP):
        plain = s.FULL_PLAIN[int(str(config.flags["--page-size"]))]
        for ask in (fills_pool, fills_pool_often):
            marks = [pytest.mark.recorded(plain, ask)]
            marks += [pytest.mark.long] * (config != s.FULL[1, 8] or ask is fills_pool_often)
            values = config, plain, ask
            yield pytest.param(*values, marks=marks, id=f"{config}-{ask.__name__}")
    for config in s.SHORT_CONTEXT:
        values = config, s.SHORT_PLAIN, fills_context
        marks = [pytest.mark.recorded(s.SHORT_PLAIN, fills_context), pytest.mark.long]
        yield pytest.param(*values, marks=marks, id=str(config))


@pytest.mark.parametrize(("config", "plain", "ask"), cases())
def test_what_plain_decoding_answers_is_answered(
    config: ServerConfig, plain: ServerConfig, ask: Ask, answers: Any, server: Server
) -> None:
    ours, theirs = answers(config, ask), answers(plain, ask)
    answered = [i for i, answer in enumerate(theirs) if "output_ids" in answer]
    assert len(answered) > 0.8 * len(theirs)
    differing = [
        (i, ours[i].get("status"))
        for i in answered
        if ours[i].get("output_ids") != theirs[i]["output_ids"]
    ]
    assert not differing
    # No two requests take each other's place again and again.
    assert max(ours[i]["meta_info"]["num_retractions"] for i in answered) <= 4
    assert server.dflash()["verify_steps"] > 50


@pytest.mark.server(s.SLIDING_PAGES_WINDOW)
def test_an_answer_is_longer_than_the_sliding_pool(server: Server) -> None:
    """Its 3,000 slots hold what the window sees: the others are freed while the answer goes on."""
    length = {"max_new_tokens": 3200, "ignore_eos": True}
    info = server.generate("import os\n", temperature=0, **length)["meta_info"]
    assert (info["completion_tokens"], info["num_retractions"]) == (3200, 0)
