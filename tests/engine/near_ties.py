"""Answers in 16 bits, which may differ where two tokens are nearly as likely.

Verification computes several tokens at once, and plain decoding one: sums are rounded otherwise.
Logits of bfloat16 are often equal, and some samplers choose among equals at random.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from sglang_dflash.tools.bench.differences import NEAR_16_BITS
from sglang_dflash.tools.bench.server import Server
from tests.engine import client
from tests.engine.comparison import PARTS
from tests.engine.servers import Ask
from tests.engine.workload import outputs

TWO_LIKELIEST = {"return_logprob": True, "top_logprobs_num": 2}


def beside_likeliest(ask: Ask) -> Ask:
    """The same requests; those of the plain server also ask for the two likeliest tokens."""

    @functools.wraps(ask)
    def plainly(server: Server) -> Any:
        def ask_one(server: Server, text: str, more: Any = None, **sampling: Any) -> Any:
            return original(server, text, {**(more or {}), **TWO_LIKELIEST}, **sampling)

        original = client.ask
        with mock.patch.object(client, "ask", ask_one):
            return ask(server)

    @functools.wraps(ask)
    def asked(server: Server) -> Any:
        return ask(server)

    PARTS[asked] = (plainly, lambda answers: answers)
    return asked


def assert_same_but_for_near_ties(got: Any, expected: Any) -> None:
    """Compare token ids. An answer may differ from a token on whose two likeliest candidates are
    within 0.25 by log-probability in the expected answer; more than a third may not."""
    ours, theirs = outputs(got), outputs(expected)
    assert ours.keys() == theirs.keys()
    scored = {"all": expected} if isinstance(expected, list) else expected
    differing, tied, answers = [], [], 0
    for kind, every in theirs.items():
        for i, (x, y) in enumerate(zip(ours[kind], every, strict=True)):
            answers += 1
            place = first_difference(x, y)
            if place is not None:
                gap = likeliest_gap(scored[kind][i], place)
                told = f"{kind}[{i}] at token {place}, gap {gap}"
                (tied if gap is not None and gap <= NEAR_16_BITS else differing).append(told)
    assert not differing, f"{len(differing)} of {answers} answers differ: {differing}"
    assert 3 * len(tied) <= answers, f"near-ties in {len(tied)} of {answers} answers: {tied}"


def first_difference(x: list[int], y: list[int]) -> int | None:
    """The first index at which two answers differ, None if they are equal."""
    differing = (i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b)
    return next(differing, None if len(x) == len(y) else min(len(x), len(y)))


def likeliest_gap(answer: dict[str, Any], place: int) -> float | None:
    """Log-probability by which the likeliest token was ahead there; None if it is not known."""
    scores = answer["meta_info"].get("output_top_logprobs") or []
    if place >= len(scores) or len(scores[place] or ()) < 2:
        return None
    (likeliest, *_), (next_likeliest, *_) = scores[place][:2]
    return abs(likeliest - next_likeliest)
