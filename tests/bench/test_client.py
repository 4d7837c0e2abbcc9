"""The client of `sglang-dflash bench` against fake servers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_dflash.bench import load
from sglang_dflash.bench.datasets import Prompt
from sglang_dflash.core.acceptance_length import VerifySteps
from tests.bench.fake_server import FakeServer, echo


@pytest.mark.parametrize("sglang", [True, False])
def test_the_clock_of_the_first_token(sglang: bool) -> None:
    with FakeServer(
        "a", lambda _: ["x"] * 5, [], sglang=sglang, delay_s=0.3, piece_s=0.1
    ) as server:
        to = load.endpoint(server.base[2:] + "/v1")
        assert isinstance(to, load.SGLang if sglang else load.OpenAI)
        got = to.ask("hi", 5, True)
    assert (
        got.tokens == 5
        and got.text == "xxxxx"
        and (got.ids == (120,) * 5 if sglang else got.ids is None)
    )
    # The whole answer takes 0.7 s; a machine that is busy adds to it.
    assert (
        0.3 <= got.first_token_s < 0.7 <= got.seconds
        and got.per_token_s is not None
        and 0.09 < got.per_token_s < 0.5
    )


@pytest.mark.parametrize("incremental", [True, False])
def test_both_ways_of_streaming_tell_the_same(incremental: bool) -> None:
    with FakeServer("a", echo, [], sglang=True, incremental=incremental) as server:
        got = load.endpoint(server.base[2:]).ask("one two", 5, True)
    assert (
        (got.text, got.tokens, got.verify_steps) == ("one two end", 3, 1)
        and got.ids is not None
        and len(got.ids) == 3
    )


def test_a_pass_runs_so_many_at_a_time_and_counts_speculation() -> None:
    log: list[Any] = []
    prompts = [Prompt((f"p {i}",), False) for i in range(6)]
    for sglang, expected, definition in (
        (True, VerifySteps(6, 12), load.OURS),
        (False, VerifySteps(6, 18), load.VLLMS),
    ):
        with FakeServer("a", echo, log, sglang=sglang, delay_s=0.2) as server:
            began = time.perf_counter()
            to = load.endpoint(server.base[2:])
            done = load.run(
                to, prompts, 3, lambda to, prompt, answers: to.ask(prompt.turns[0], 8, True)
            )
            # Two waves of three.
            assert 0.4 <= done.seconds <= time.perf_counter() - began < 1.1
        assert [turns[0].text for turns in done.answers] == [f"p {i} end" for i in range(6)]
        assert done.speculation == expected and done.definition == definition
        assert done.tokens == 18
