"""The verify width of every decode step: what the policy needs to know of SGLang's batches, and how
long steps take."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.width import TimedStep, WidthPolicy
from sglang_dflash.serving.step.batch import ScheduleBatch


class _HostEvent:
    """A point in time of the host, with the interface of a device's events."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _HostEvent) -> float:
        return 1e3 * (later._at - self._at)


class StepClock:
    """Durations from the beginning of a decode step to the beginning of the next, without waiting.

    A CPU's steps end before the host goes on. An accelerator works on a step after the host has
    launched it, so its steps are timed by events on the current stream: under overlap scheduling,
    the host's own time would be that of another step.
    """

    def __init__(self, device: torch.device) -> None:
        is_host = device.type == "cpu"
        self._module: Any = None if is_host else torch.get_device_module(device)
        # The step that runs, once it is described: its batch size, context and width; and those
        # whose end has not passed.
        self._began: Any = None
        self._running: tuple[int, int, int] | None = None
        self._unfinished: deque[tuple[Any, Any, tuple[int, int, int]]] = deque()

    def start_step(self) -> list[TimedStep]:
        """Start the clock of a decode step, and return the steps whose durations have become
        known."""
        now = self._now()
        if self._running is not None:
            self._unfinished.append((self._began, now, self._running))
        self._began, self._running = now, None
        finished = []
        while self._unfinished and self._unfinished[0][1].query():
            began, ended, step = self._unfinished.popleft()
            finished.append(TimedStep(began.elapsed_time(ended) / 1e3, *step))
        return finished

    def _now(self) -> Any:
        if self._module is None:
            return _HostEvent()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def describe_step(self, batch_size: int, context: int, width: int) -> None:
        """Note what the step that has begun is, see `TimedStep`. Without it, it is not timed."""
        self._running = batch_size, context, width

    def restart_step(self) -> None:
        """Restart the clock of the step: time since `start_step` belongs to no step."""
        self._began = self._now()

    def drop_step(self) -> None:
        """Drop the last step: something else than a decode step runs, and its end is not known."""
        self._running = None


class StepWidths:
    """Chooses widths, measures steps, and passes outcomes on to the policy.

    Attributes:
        clock: to be told what else runs than a decode step's own work.
        steps: decode steps by width, without those that failed.
    """

    def __init__(self, policy: WidthPolicy, tp: TensorParallel, clock: StepClock) -> None:
        self.policy, self._tp, self.clock = policy, tp, clock
        self.steps = Counter(dict.fromkeys(policy.widths, 0))
        self._is_fixed = len(policy.widths) == 1

    def choose(self, batch: ScheduleBatch, takes_one_token: Sequence[bool]) -> int:
        """The width of the step that begins now.

        Args:
            takes_one_token: see `Step`.
        """
        if self._is_fixed:
            return self.policy.widths[0]
        for step in self.clock.start_step():
            self.policy.record(step)
        rids, undrafted, context, most = [], 0, 0, 0
        for request, is_single in zip(batch.reqs, takes_one_token, strict=True):
            if is_single:
                undrafted += 1
            else:
                rids.append(request.rid)
            output = len(request.output_ids)
            context = max(context, len(request.origin_input_ids) + output)
            most = max(most, request.sampling_params.max_new_tokens - output)
        # Durations differ between ranks.
        width = self._tp.from_first(self.policy.choose(rids, context, most, undrafted))
        self.clock.describe_step(len(batch.reqs), context, width)
        return width

    def observe(self, width: int, accepted: Mapping[str, int]) -> None:
        """Outcome of a step, by request: accepted drafts of those that took drafts and live."""
        if not self._is_fixed:
            self.policy.observe(list(accepted), width, list(accepted.values()))
