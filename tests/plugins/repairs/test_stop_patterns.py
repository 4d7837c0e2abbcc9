"""A stop pattern that takes exponential time costs its own request only."""

from __future__ import annotations

import hashlib
import itertools
import signal
import sys
import threading
import time
from http import HTTPStatus
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.plugins.repairs import stop_patterns
from tests.patches.originals import original


def request(pattern: str, text: str) -> Any:
    params = SimpleNamespace(stop_strs=[], stop_regex_strs=[pattern])
    made = Req.__new__(Req)
    made.sampling_params, made.finished_reason, made.rid = params, None, "r"
    made.output_ids = [5]
    made.tail_str = lambda _accepted: text
    made._locate_str_stop_finished_len = lambda *_, **__: 1
    return made


def look(of: Any) -> Any:
    """SGLang's. Its registry of hooks replaces a function that a module keeps."""
    return original("sglang.srt.managers.schedule_batch.Req._check_str_based_finish")(of)


EXPONENTIAL = "(x+x+)+y", 60 * "x"


def test_a_pattern_takes_for_ever_without_the_row() -> None:
    with pytest.raises(stop_patterns.SearchTimeout):
        stop_patterns.within(1, look, request(*EXPONENTIAL))


def test_a_pattern_that_takes_too_long_ends_its_request() -> None:
    slow = request(*EXPONENTIAL)
    assert stop_patterns.match_in_time(look, slow)
    assert isinstance(slow.finished_reason, FINISH_ABORT)
    # An equal number would not do: SGLang's streams show the error of an `HTTPStatus` only.
    assert slow.finished_reason.to_json()["status_code"] is HTTPStatus.BAD_REQUEST
    assert slow.finished_reason.message.startswith("stop_regex: ['(x+x+)+y']; ")


@pytest.mark.parametrize(("text", "found"), [("a;", True), ("a", False)])
def test_others_are_looked_for_as_before(text: str, found: bool) -> None:
    usual = request("[a-z];", text)
    assert stop_patterns.match_in_time(look, usual) is found
    assert (usual.finished_reason is not None) is found
    # The limit is over.
    began = time.process_time()
    while time.process_time() - began < 2 * stop_patterns.FIRST:
        pass


def test_other_threads_do_not_count() -> None:
    """Such as those of a forward, which may be busy for a while after it."""
    ended = threading.Event()

    def busy() -> None:
        while not ended.is_set():
            hashlib.sha256(bytes(1 << 24))

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for one in threads:
        one.start()
    try:
        stop_patterns.within(stop_patterns.FIRST, time.sleep, 8 * stop_patterns.FIRST)
    finally:
        ended.set()
        for one in threads:
            one.join()


class Timer:
    """Delivers its signal where it is told, when the time is up. `armed` until it is turned off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed, self.fires_when_off = False, False
        seconds = itertools.count(0, 10)
        monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
        monkeypatch.setattr(signal, "setitimer", self.set)

    def set(self, _which: int, seconds: float) -> None:
        was, self.armed = self.armed, seconds > 0
        if was and not self.armed and self.fires_when_off:
            signal.raise_signal(signal.SIGVTALRM)

    def fire(self) -> None:
        self.armed = False
        signal.raise_signal(signal.SIGVTALRM)


def test_a_timer_may_fire_while_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    before, timer = signal.getsignal(signal.SIGVTALRM), Timer(monkeypatch)
    timer.fires_when_off = True
    assert stop_patterns.within(1, lambda: 5) == 5
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_a_timer_may_fire_at_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fires before every operation of the interpreter between its start and its end."""
    before, timer, outcomes = signal.getsignal(signal.SIGVTALRM), Timer(monkeypatch), set[object]()

    def fired(at: int) -> bool:
        operations = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal operations
            if frame.f_code is not stop_patterns.within.__code__:
                return None
            frame.f_trace_opcodes = True
            operations += event == "opcode" and timer.armed
            if timer.armed and operations > at:
                timer.fire()
            return trace

        timer.armed = False
        tracer = sys.gettrace()
        sys.settrace(trace)
        try:
            outcomes.add(stop_patterns.within(1, lambda: 5))
        except stop_patterns.SearchTimeout:
            outcomes.add(stop_patterns.SearchTimeout)
        finally:
            sys.settrace(tracer)
        assert signal.getsignal(signal.SIGVTALRM) == before and not timer.armed
        return operations > at

    points = 0
    while fired(points):
        points += 1
    assert points > 10 and outcomes == {5, stop_patterns.SearchTimeout}


def test_looks_that_are_slow_each_time_end_their_request_too() -> None:
    """Each takes an eighth of the time: no single one is too long."""
    slow, looks = request("a", "b"), 0

    def an_eighth(_of: Any) -> bool:
        began = time.thread_time()
        while time.thread_time() - began < stop_patterns.FIRST / 8:
            pass
        return False

    while not stop_patterns.match_in_time(an_eighth, slow):
        looks, slow.output_ids = looks + 1, [*slow.output_ids, 5]
        assert looks < 1000
    assert looks > 1 and isinstance(slow.finished_reason, FINISH_ABORT)


def of_two_ranks(monkeypatch: pytest.MonkeyPatch, seconds: float, **other: int) -> list[Any]:
    """The other rank has taken so long. Returns what this one sends."""
    group = SimpleNamespace(world_size=2, cpu_group="both")
    parallel = SimpleNamespace(**({"pp_size": 1, "attn_cp_size": 1} | other), attn_tp_group=group)
    sent: list[Any] = []

    def all_reduce(mine: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX and group == "both"
        sent.append(float(mine))
        mine.clamp_(min=seconds)

    monkeypatch.setattr(stop_patterns, "get_parallel", lambda: parallel)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return sent


@pytest.mark.parametrize("text", ["a;", "a"])
def test_a_request_that_took_too_long_on_another_rank_ends_on_this_one(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found here or not. Ranks whose batches differ wait for each other for ever."""
    of_two_ranks(monkeypatch, inf)
    usual = request("[a-z];", text)
    assert stop_patterns.match_in_time(look, usual)
    assert isinstance(usual.finished_reason, FINISH_ABORT) and usual.finished_len is None


def test_ranks_count_the_seconds_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    of_two_ranks(monkeypatch, stop_patterns.FIRST / 2)
    usual = request("[a-z];", "a")
    assert not stop_patterns.match_in_time(look, usual)
    assert usual.dflash_stop_seconds == stop_patterns.FIRST / 2
    sent = of_two_ranks(monkeypatch, 0.0)
    assert stop_patterns.match_in_time(look, request(*EXPONENTIAL))
    assert sent == [inf]


@pytest.mark.parametrize("other", [{"pp_size": 2}, {"attn_cp_size": 2}], ids=str)
def test_ranks_that_look_at_other_times_have_no_limit(
    other: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = of_two_ranks(monkeypatch, inf, **other)
    assert not stop_patterns.match_in_time(look, request("[a-z];", "a"))
    assert not sent
