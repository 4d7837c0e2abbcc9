"""Differences between the answers of arms, and a check whether the first differing token was a
near-tie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sglang_dflash.common.errors import Failed
from sglang_dflash.tools.bench.load import Answer, BenchPass, Endpoint, SGLang, send_request

# Data set and concurrency -> arm -> one pass per round. All arms have the same order of prompts.
Runs = dict[tuple[str, int], dict[str, list[BenchPass]]]
# Rounding may swap tokens whose log-probabilities are this close. In float32, sums over a thousand
# terms differ in the sixth digit; in 16 bits, logits between 16 and 32 are multiples of 0.125.
NEAR_FLOAT32, NEAR_16_BITS = 1e-3, 0.25


class Difference(NamedTuple):
    """The first difference of an answer from the first arm's.

    Attributes:
        before: the first arm's answers to earlier turns.
        answer: the first arm's answer to the turn that differs.
        place: index of the first differing token; of the character if a server sends no token ids.
    """

    arm: str
    first: str
    dataset: str
    prompt: int
    concurrency: int
    before: tuple[Answer, ...]
    answer: Answer
    place: int
    is_token: bool

    def __str__(self) -> str:
        return (
            f"arm {self.arm}, data set {self.dataset}, prompt {self.prompt}, concurrency "
            f"{self.concurrency}: the answer differs from {self.first}'s from "
            f"{'token' if self.is_token else 'character'} {self.place} on"
        )


def differences(runs: Runs) -> dict[str, list[Difference]]:
    """Return each other arm's differences from the first arm's answers of the same round."""
    differing: dict[str, list[Difference]] = {}
    for (dataset, concurrency), by_arm in runs.items():
        first_arm, *other_arms = by_arm
        for arm in other_arms:
            places = differing.setdefault(arm, [])
            for reference, compared in zip(by_arm[first_arm], by_arm[arm], strict=False):
                pairs = zip(reference.answers, compared.answers, strict=True)
                for prompt, (expected, actual) in enumerate(pairs):
                    difference = _first_difference(expected, actual)
                    if difference is not None:
                        turn, place, is_token = difference
                        before, answer = tuple(expected[:turn]), expected[turn]
                        whose = arm, first_arm, dataset, prompt, concurrency
                        places.append(Difference(*whose, before, answer, place, is_token))
    return differing


def _first_difference(expected: list[Answer], actual: list[Answer]) -> tuple[int, int, bool] | None:
    """Return turn, place and `is_token` of the first difference, or None. Later turns are not
    compared: their histories differ."""
    for turn, (a, b) in enumerate(zip(expected, actual, strict=True)):
        is_token = a.ids is not None and b.ids is not None
        x, y = (a.ids or (), b.ids or ()) if is_token else (a.text, b.text)
        if x != y:
            unequal = (i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q)
            return turn, next(unequal, min(len(x), len(y))), is_token
    return None


@dataclass(frozen=True)
class NearTie:
    """The gap between the two likeliest tokens at a position where two arms took different ones.

    Attributes:
        gaps: arm -> difference of the log-probabilities, as its server computes them after the
            same tokens.
        near: the largest gap whose order rounding may change.
    """

    gaps: Mapping[str, float]
    near: float

    @property
    def is_near(self) -> bool:
        return all(gap <= self.near for gap in self.gaps.values())

    def __str__(self) -> str:
        gaps = " and ".join(f"{gap:.2g} on {arm}" for arm, gap in self.gaps.items())
        verdict = "a near-tie" if self.is_near else "no near-tie: rounding does not explain it"
        return (
            f"there the log-probabilities of the two likeliest tokens differ by {gaps}, {verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "near_tie": self.is_near}


def near_tie(
    difference: Difference, prompt: Any, endpoints: Mapping[str, Endpoint], is_float32: bool
) -> NearTie | None:
    """Ask the servers of both arms for the gap at the first differing token of a greedy answer.

    Returns None if a server does not report log-probabilities.

    Args:
        prompt: the prompt of the answer, as the first arm got it.
        endpoints: arm -> its server.
    """
    servers = {arm: endpoints.get(arm) for arm in (difference.first, difference.arm)}
    if not difference.is_token or not all(
        isinstance(server, SGLang) for server in servers.values()
    ):
        return None
    prefix = list((difference.answer.ids or ())[: difference.place])
    try:
        gaps = {
            arm: _gap(server.url, prompt, prefix)
            for arm, server in servers.items()
            if server is not None
        }
    except (Failed, LookupError, TypeError, ValueError):  # A server without log-probabilities.
        return None
    return NearTie(gaps, NEAR_FLOAT32 if is_float32 else NEAR_16_BITS)


def _gap(url: str, prompt: Any, answer: list[int]) -> float:
    """Return the difference between the log-probabilities of the two likeliest tokens after a
    prompt and the beginning of an answer to it.

    Raises:
        Failed: SGLang's server does not answer.
        LookupError: the answer has no log-probabilities.
    """
    if isinstance(prompt, str):
        meta_info = _likely(url, {"text": prompt, "logprob_start_len": 0})
        prompt = [token for _, token, *_ in meta_info["input_token_logprobs"]]
    meta_info = _likely(url, {"input_ids": [*prompt, *answer], "top_logprobs_num": 2})
    (likeliest, *_), (next_likeliest, *_) = meta_info["output_top_logprobs"][0]
    return abs(likeliest - next_likeliest)


def _likely(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    single = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {**fields, "return_logprob": True, "sampling_params": single}
    response = send_request("POST", f"{url}/generate", json=body)
    if not response.ok:
        raise Failed(f"{url}: status {response.status_code}, {response.text[:300]}")
    return response.json()["meta_info"]
