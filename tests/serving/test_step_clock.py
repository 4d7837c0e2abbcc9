"""Durations of decode steps, on the host and on a made-up accelerator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.serving.step import clock as step_clock
from sglang_dflash.serving.step.clock import (
    DeviceClock,
    HostClock,
    StepClock,
    StepShape,
    clock_of,
)

A, B, C = StepShape(1, 500, 1), StepShape(2, 500, 4), StepShape(2, 600, 8)


class Stream:
    """Work of so many seconds in a row; events pass when `done` does. The host does not wait."""

    def __init__(self) -> None:
        self.enqueued = self.done = 0.0

    def event(self, enable_timing: bool = False) -> Any:
        assert enable_timing
        at: list[float] = []
        return SimpleNamespace(
            at=at,
            record=lambda: at.append(self.enqueued),
            query=lambda: at[0] <= self.done,
            elapsed_time=lambda later: 1e3 * (later.at[0] - at[0]),
        )


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    module = SimpleNamespace(Event=made.event)
    monkeypatch.setattr(step_clock.torch, "get_device_module", lambda _device: module)
    return made


def test_a_step_has_the_time_that_the_device_worked_on_it(stream: Stream) -> None:
    """The host is a step ahead: by its own clock a wide step would be as long as the one before."""
    clock, found = DeviceClock(torch.device("cuda")), []
    for shape, seconds, done in ((A, 1.0, 0.0), (C, 4.0, 0.0), (A, 1.0, 1.0), (B, 2.0, 6.0)):
        stream.done = done
        found.append(clock.begins())
        clock.is_of(shape)
        stream.enqueued += seconds
    assert found == [[], [], [(1.0, A)], [(4.0, C), (1.0, A)]]


def test_what_is_between_two_steps_counts_for_neither(stream: Stream) -> None:
    clock = DeviceClock(torch.device("cuda"))
    clock.begins()
    clock.is_of(A)
    stream.enqueued += 1.0
    clock.interrupted()
    stream.enqueued += 50.0
    assert clock.begins() == []
    clock.is_of(B)
    stream.enqueued += 2.0
    stream.done = 100.0
    assert clock.begins() == [(2.0, B)]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_work_of_earlier_steps_is_none_of_a_steps(
    kind: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before ends where this one was to begin."""
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: stream.enqueued)
    clock: StepClock = HostClock() if kind == "host" else DeviceClock(torch.device("cuda"))
    stream.done = 100.0
    clock.begins()
    clock.is_of(A)
    stream.enqueued += 1.0
    found = clock.begins()
    clock.is_of(B)
    stream.enqueued += 7.0
    clock.begins_now()
    stream.enqueued += 2.0
    assert [*found, *clock.begins()] == [(1.0, A), (2.0, B)]


def test_a_step_of_unknown_shape_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(readings))
    clock = HostClock()
    assert clock.begins() == [] and clock.begins() == []
    clock.is_of(A)
    assert clock.begins() == [(2.0, A)]


def test_a_cpu_is_timed_by_the_host() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
