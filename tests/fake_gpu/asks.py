"""Few and short requests, of every sort: on a faked GPU a step takes half a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine import client, workload

Answers = list[dict[str, Any]]
PROMPTS = workload.prompts()
NEW_TOKENS = 20


def at_once(jobs: Iterable[Callable[[], Any]], clients: int) -> Answers:
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda job: job(), jobs))


def greedy(server: Server) -> dict[str, Answers]:
    """Prompts by themselves, six in one request, a long one, and one that is cached by then. Of
    prompts that arrive together as many run at a time as the server lets run."""
    demo, short, long = (PROMPTS[name] for name in ("demo", "short", "long"))

    def answered(text: str | list[str]) -> Any:
        return client.ask(server, text, max_new_tokens=NEW_TOKENS)

    return {
        "alone": [answered(text) for text in demo[:2]],
        "together": answered([*demo[2:5], *short[6:9]]),
        "long": [answered(long[2])],
        "cached": [answered(long[2] + "\n    def")],
    }


SHORT_CONTEXT = 256


def to_the_limit(server: Server) -> Answers:
    """Two at a time, from near the end of a `SHORT_CONTEXT` to it. SGLang takes no more than its
    length - 2 tokens of prompt and answer."""
    sampling = {**client.GREEDY, "max_new_tokens": 2 * NEW_TOKENS}
    prompts = [
        list(range(first, first + SHORT_CONTEXT - 2 * NEW_TOKENS - 2)) for first in (300, 600)
    ]
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    return client.together(
        lambda body=body: client.post(server, "generate", body).json() for body in bodies
    )


POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
        "at": {"type": "integer"},
    },
    "required": ["name", "at"],
    "additionalProperties": False,
}
# What a request can ask for and have answered in one way only.
SORTS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    {"min_new_tokens": 12, "ignore_eos": False},
    {"logit_bias": {"77": 3.0, "260": 3.0, "14": -4.0}},
    {"regex": r"(\d{2}-[xyz]{3};){3}", "ignore_eos": False},
    {"json_schema": json.dumps(POINT), "ignore_eos": False},
    {"stop": ["return", "self"], "ignore_eos": False},
    {"stop_token_ids": [14, 198], "ignore_eos": False},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_p": 0.0001},
    {"n": 2},
    {},
]
SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}


def every_sort(server: Server) -> Answers:
    """One request of each, three at a time; then one with log-probabilities, and one whose
    penalties are beside a request that is aborted."""
    text = PROMPTS["short"][9]

    def answered(sort: dict[str, Any]) -> Answers:
        answer = client.ask(server, text, **{"max_new_tokens": NEW_TOKENS, **sort})
        return answer if isinstance(answer, list) else [answer]

    answers = at_once([lambda sort=sort: answered(sort) for sort in SORTS], 3)
    scored = client.ask(server, PROMPTS["demo"][3], SCORES, max_new_tokens=NEW_TOKENS)
    return [answer for each in answers for answer in each] + [scored]


def aborted(server: Server) -> Answers:
    """Two requests beside one whose client hangs up."""

    def hang_up() -> None:
        body = {
            "text": PROMPTS["demo"][5],
            "sampling_params": {**client.GREEDY, "max_new_tokens": 400},
        }
        with requests.post(
            f"{server.url}/generate", json={**body, "stream": True}, stream=True
        ) as response:
            next(response.iter_lines())

    ask = [
        lambda t=t: client.ask(server, t, max_new_tokens=NEW_TOKENS) for t in PROMPTS["demo"][6:8]
    ]
    first, _, third = client.together([ask[0], hang_up, ask[1]])
    client.at_rest(server)
    return [first, third]


def constrained(server: Server) -> Answers:
    """Ask with grammars, penalties and a bias, two at a time."""
    jobs = [
        lambda i=i, sort=sort: client.ask(
            server, PROMPTS["short"][i], **{"max_new_tokens": NEW_TOKENS, **sort}
        )
        for i, sort in enumerate(SORTS[:5])
    ]
    return at_once(jobs, 2)


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
]


def seeded(server: Server) -> Answers:
    """Sampled with seeds, two at a time."""
    jobs = [
        lambda i=i, way=way: client.ask(
            server, PROMPTS["demo"][i], max_new_tokens=NEW_TOKENS, sampling_seed=100 + i, **way
        )
        for i, way in enumerate(SAMPLED)
    ]
    return at_once(jobs, 2)


def sampled(server: Server) -> Answers:
    """Sampled without seeds: every run has other answers."""
    jobs = [
        lambda i=i, way=way: client.ask(
            server, PROMPTS["demo"][i], max_new_tokens=NEW_TOKENS, **way
        )
        for i, way in enumerate(SAMPLED)
    ]
    return at_once(jobs, 2)


def hybrid(server: Server) -> Answers:
    """Texts of the hybrid pair."""
    jobs = [
        lambda t=t: client.ask(server, t, max_new_tokens=NEW_TOKENS)
        for t in demo_pair("hybrid").prompts[:3]
    ]
    return [jobs[0](), *at_once(jobs[1:], 2)]
