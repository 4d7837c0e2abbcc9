"""How long decode steps take, without waiting for any of them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch


class StepShape(NamedTuple):
    """What a step's duration depends on: its requests, the longest context, and its width."""

    requests: int
    context: int
    width: int


class Timed(NamedTuple):
    """A step and its duration."""

    seconds: float
    shape: StepShape


class StepClock(Protocol):
    """Durations from the beginning of a decode step to the beginning of the next."""

    def begins(self) -> list[Timed]:
        """A decode step begins. Returns the steps whose durations have become known."""

    def is_of(self, shape: StepShape) -> None:
        """The step that has begun is of this shape."""

    def begins_now(self) -> None:
        """What was done since `begins` belongs to no step."""

    def interrupted(self) -> None:
        """Something else than a decode step runs: the last step's end is not known."""


class HostClock:
    """For a CPU, whose steps end before the host goes on."""

    def __init__(self) -> None:
        self._began = 0.0
        self._last: StepShape | None = None

    def begins(self) -> list[Timed]:
        now = time.perf_counter()
        known = [] if self._last is None else [Timed(now - self._began, self._last)]
        self._began, self._last = now, None
        return known

    def is_of(self, shape: StepShape) -> None:
        self._last = shape

    def begins_now(self) -> None:
        self._began = time.perf_counter()

    def interrupted(self) -> None:
        self._last = None


class _Open(NamedTuple):
    began: Any
    shape: StepShape
    ended: Any


class DeviceClock:
    """For an accelerator, which works on a step after the host has launched it: events on the
    current stream. Under overlap scheduling the host's own time would be that of another step."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._began: Any = None
        self._last: StepShape | None = None
        self._open: deque[_Open] = deque()

    def begins(self) -> list[Timed]:
        now = self._now()
        if self._last is not None:
            self._open.append(_Open(self._began, self._last, now))
        self._began, self._last = now, None
        known = []
        while self._open and self._open[0].ended.query():
            began, shape, ended = self._open.popleft()
            known.append(Timed(began.elapsed_time(ended) / 1e3, shape))
        return known

    def _now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def is_of(self, shape: StepShape) -> None:
        self._last = shape

    def begins_now(self) -> None:
        self._began = self._now()

    def interrupted(self) -> None:
        self._last = None


def clock_of(device: torch.device) -> StepClock:
    """The one for steps on that device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
