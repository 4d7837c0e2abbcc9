"""The client of `sglang-dflash bench` against fake servers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_dflash.bench import load
from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.drafting.acceptance_length import VerifySteps
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
    # The first token takes 0.3 s, the whole answer 0.7 s. A busy machine adds to both, and what it
    # adds to the first one is missing from the time between tokens.
    assert 0.3 <= got.first_token_s < got.seconds - 0.1 and got.seconds >= 0.7
    between = got.seconds - got.first_token_s
    assert got.per_token_s == pytest.approx(between / 4)
    assert len(got.gaps_s) == 4 and 0.5 * between < sum(got.gaps_s) <= between
    assert max(got.gaps_s) < 0.9 * between


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


def test_steps_without_drafts_are_no_verify_steps() -> None:
    """An adaptive server decodes plainly now and then."""
    prompts = [Prompt(("p",), False)] * 4
    with FakeServer("a", lambda _: ["x"] * 6, [], sglang=True, undrafted=1) as server:
        to = load.endpoint(server.base[2:])
        for _ in range(2):
            done = load.run(to, prompts, 2, lambda to, prompt, _: to.ask(prompt.turns[0], 6, True))
            # Of two steps and five tokens per answer.
            assert done.speculation == VerifySteps(4 * (2 - 1), 4 * (5 - 1))


def test_tokens_that_come_together_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 10.8, 11.8])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = load.Clock()
    for tokens in (2, 3, 1):
        clock.arrived(tokens)
    # Those of the first piece have no gap before them.
    assert clock.first == 10.5 and clock.gaps == pytest.approx([0.1] * 3 + [1.0])


def test_sampling_and_verify_steps_travel() -> None:
    log: list[Any] = []
    sampling = load.Sampling(0.5, 0.9, 4, 3)
    with FakeServer("a", lambda _: ["x"] * 6, log, sglang=True) as server:
        got = load.SGLang(server.base[2:], sampling).ask("hi", 6, False)
    assert got.verify_steps == 2 and got.correct_drafts == (0, 1, 1)
    sent = log[0][2]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.5, 0.9, 4)
    assert sent["sampling_seed"] == 3
    with FakeServer("b", echo, log) as server:
        to = load.OpenAIChat(server.base[2:], "m", sampling, thinking=True)
        assert to.ask("one two", 6, False).text == "one two end"
    sent = log[1][2]
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    assert sent["messages"] == [{"role": "user", "content": "one two"}] and sent["seed"] == 3


def test_requests_are_sent_at_their_times() -> None:
    sent: list[float] = []
    prompts = [Prompt((str(i),), False) for i in range(4)]

    def ask(to: load.Endpoint, prompt: Prompt, answers: list[str]) -> load.Answer:
        sent.append(time.perf_counter())
        return load.Answer("", None, 1, 0.0, 0.0)

    with FakeServer("a", echo, [], sglang=True) as server:
        began = time.perf_counter()
        load.run(load.endpoint(server.base[2:]), prompts, 4, ask, sent_at_s=[0.0, 0.1, 0.3, 0.6])
    for at, earliest in zip(sent, (0.0, 0.1, 0.3, 0.6), strict=True):
        assert at - began >= earliest
    assert sent[1] - began < 0.3


def test_arrivals_have_the_rate_and_depend_on_the_seed() -> None:
    times = load.arrivals(4000, 5.0, seed=1)
    assert times[0] == 0 and times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(5, rel=0.05)
    assert times == load.arrivals(4000, 5.0, seed=1) != load.arrivals(4000, 5.0, seed=2)


def test_a_failure_ends_a_paced_pass_at_once() -> None:
    def ask(*_: Any) -> load.Answer:
        raise load.RequestFailed("made to fail")

    prompts, began = [Prompt(("p",), False)] * 3, time.perf_counter()
    with (
        FakeServer("a", echo, [], sglang=True) as server,
        pytest.raises(load.RequestFailed, match="made to fail"),
    ):
        to = load.endpoint(server.base[2:])
        load.run(to, prompts, 1, ask, sent_at_s=[0.0, 0.2, 60.0])
    assert time.perf_counter() - began < 30
