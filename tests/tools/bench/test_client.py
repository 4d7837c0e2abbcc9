"""The client of `sglang-dflash bench` against fake servers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from sglang_dflash.common.errors import Failed
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench import load
from sglang_dflash.tools.bench.datasets import Prompt
from tests.tools.bench.fake_server import FakeServer, Handler, echo

SIX = [Prompt((f"p {i}",), False) for i in range(6)]


def ask(to: load.Endpoint, prompt: Prompt, answers: list[str]) -> load.Answer:
    return to.ask(prompt.turns[0], 8, True)


@pytest.mark.parametrize("sglang", [True, False])
def test_the_clock_of_the_first_token(sglang: bool) -> None:
    with FakeServer(
        "a", lambda _: ["x"] * 5, [], sglang=sglang, delay_s=0.3, piece_s=0.1
    ) as server:
        to = load.endpoint(server.url + "/v1")
        assert isinstance(to, load.SGLang if sglang else load.OpenAI)
        got = to.ask("hi", 5, True)
    assert (got.tokens, got.text) == (5, "xxxxx")
    assert got.ids == ((120,) * 5 if sglang else None)
    # The first token takes 0.3 s, the whole answer 0.7 s. A busy machine adds to both, and what it
    # adds to the first one is missing from the time between tokens.
    assert 0.3 <= got.first_token_s < got.seconds - 0.1 and got.seconds >= 0.7
    assert got.per_token_s == pytest.approx((got.seconds - got.first_token_s) / 4)


def test_a_server_that_asks_for_a_key_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_for_key(handler: Handler) -> None:
        handler._send(401, "{}")

    monkeypatch.setattr(Handler, "do_GET", asks_for_key)
    with FakeServer("a", echo, []) as server, pytest.raises(Failed, match="401: it asks for an"):
        load.endpoint(server.url)


@pytest.mark.parametrize("incremental", [True, False])
def test_both_ways_of_streaming_tell_the_same(incremental: bool) -> None:
    with FakeServer("a", echo, [], sglang=True, incremental=incremental) as server:
        got = load.endpoint(server.url).ask("one two", 5, True)
    assert (got.text, got.tokens, got.verify_steps) == ("one two end", 3, 1)
    assert got.ids is not None and len(got.ids) == 3


@pytest.mark.parametrize(
    "sglang, undrafted, expected",
    [
        (True, 0, VerifySteps(6, 12)),
        # An adaptive server decodes plainly now and then: that is no verify step.
        (True, 1, VerifySteps(0, 6)),
        (False, 0, VerifySteps()),
    ],
)
def test_a_pass_runs_so_many_at_a_time_and_counts_speculation(
    sglang: bool, undrafted: int, expected: VerifySteps
) -> None:
    three, running, at_once = threading.Barrier(3), list[str](), list[int]()

    def answer(prompt: str) -> list[str]:
        """Answer once three requests wait for it."""
        running.append(prompt)
        at_once.append(len(running))
        three.wait(60)
        running.remove(prompt)
        return echo(prompt)

    with FakeServer("a", answer, [], sglang=sglang, undrafted=undrafted) as server:
        began = time.perf_counter()
        done = load.run(load.endpoint(server.url), SIX, 3, ask)
        assert 0 < done.seconds <= time.perf_counter() - began
    assert max(at_once) == 3
    assert [turns[0].text for turns in done.answers] == [f"p {i} end" for i in range(6)]
    assert done.speculation == expected and done.tokens == 18


def test_sampling_and_chats_travel() -> None:
    log: list[Any] = []
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    with FakeServer("a", lambda _: ["x"] * 6, log, sglang=True) as server:
        got = load.SGLang(server.url, sampling).ask("hi", 6, False)
    assert got.verify_steps == 2
    assert sampling.items() <= log[0][2]["sampling_params"].items()
    chat = [{"role": "user", "content": "one two"}]
    with FakeServer("b", echo, log) as server:
        to = load.OpenAI(server.url, "m", sampling, thinking=True)
        assert to.ask(chat, 6, False).text == "one two end"
    sent = log[1][2]
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    assert sent["messages"] == chat and sampling.items() <= sent.items()


def test_the_first_failure_cancels_the_rest() -> None:
    asked: list[str] = []

    def fails(_: Any, prompt: Prompt, __: Any) -> load.Answer:
        asked.append(prompt.turns[0])
        raise Failed("made to fail")

    with (
        FakeServer("a", echo, [], sglang=True) as server,
        pytest.raises(Failed, match="made to fail"),
    ):
        load.run(load.endpoint(server.url), SIX * 50, 1, fails)
    assert len(asked) < 300


def test_an_answer_that_the_server_ended_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"type": "abort", "message": "no such token"}
    chunk = {
        "output_ids": [1],
        "text": "x",
        "meta_info": {"completion_tokens": 1, "finish_reason": ended},
    }
    monkeypatch.setattr(load, "chunks", lambda *_: iter([chunk]))
    with pytest.raises(Failed, match="no such token"):
        load.SGLang("http://server").ask("hi", 5, True)


def test_a_server_that_is_gone_is_named() -> None:
    sglang, openai = load.SGLang("http://127.0.0.1:9"), load.OpenAI("http://127.0.0.1:9", "m")
    for asked in (sglang.flush, sglang.info, sglang.count_steps, openai.flush):
        with pytest.raises(Failed, match=r"^http://127\.0\.0\.1:9/"):
            asked()
