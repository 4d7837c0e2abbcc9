"""Time of decode steps by their parts: of a worker whose target's forward takes 0.7 s, and no other
part any time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.serving.metrics.step_times import StepTimes
from sglang_dflash.serving.step.scheduler import leave_out_pause
from tests.patches.originals import original
from tests.serving.batches import batch_of
from tests.serving.in_process import decode_of, filled, prefill_of, worker_of

LENGTHS = [9, 14]


class Clock:
    """Seconds, as a test moves them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(clock: Clock) -> Any:
    """Return a worker after a prefill."""
    made = filled(worker_of(), LENGTHS)
    made.figures.times = StepTimes(clock)
    made.target_worker.on_launch = lambda: clock.passes(0.7)
    return made


def step(worker: Any) -> None:
    worker.forward_batch_generation(decode_of(LENGTHS))


def shown(worker: Any) -> tuple[float, dict[str, float]]:
    report = worker.figures.report()
    return report["step_milliseconds"], report["step_shares"]


def test_nothing_is_told_before_a_step(worker: Any) -> None:
    assert shown(worker) == (None, {})


def test_the_time_between_steps_is_the_hosts(worker: Any, clock: Clock) -> None:
    for _ in range(5):
        step(worker)
        clock.passes(0.3)
    milliseconds, shares = shown(worker)
    assert milliseconds == pytest.approx(1000)
    assert list(shares) == ["verify", "propose", "commit", "host"]
    assert shares == pytest.approx({"verify": 0.7, "propose": 0, "commit": 0, "host": 0.3})


def test_so_is_the_rest_of_a_step(worker: Any, clock: Clock) -> None:
    worker.observer = SimpleNamespace(
        before_step=lambda *_: clock.passes(0.1), after_step=lambda *_: clock.passes(0.2)
    )
    step(worker)
    milliseconds, shares = shown(worker)
    assert milliseconds == pytest.approx(1000) and shares["host"] == pytest.approx(0.3)


def test_what_passes_while_something_else_runs_or_nothing_is_no_steps(
    worker: Any, clock: Clock
) -> None:
    def prefill() -> None:
        worker.forward_batch_generation(prefill_of([0, 0], LENGTHS))

    def take_over() -> None:
        batch = decode_of(LENGTHS)
        batch.spec_info.future_indices = None
        worker.seeds.note = lambda _: None
        worker.take_over(batch)

    def idle() -> None:
        worker.forward_batch_generation(batch_of(forward_mode=ForwardMode.IDLE))

    for interruption in (prefill, take_over, idle):
        step(worker)
        clock.passes(60)
        interruption()
    step(worker)
    clock.passes(0.3)
    step(worker)
    assert shown(worker)[0] == pytest.approx(1000)


@pytest.mark.parametrize(("row", "milliseconds"), [(True, 700), (False, 60_700)])
def test_a_pause_is_a_step_without_the_row(
    worker: Any, clock: Clock, row: bool, milliseconds: float
) -> None:
    """One in place: `/pause_generation` leaves the running batch as it is, and no prefill
    follows."""
    continue_generation = original("sglang.srt.managers.scheduler.Scheduler.continue_generation")
    scheduler = SimpleNamespace(
        draft_worker=SimpleNamespace(dflash=worker),
        disaggregation_mode=DisaggregationMode.NULL,
        _pause_started_at=None,
    )
    asked = SimpleNamespace(torch_empty_cache=False)
    step(worker)
    clock.passes(60)
    if row:
        leave_out_pause(scheduler, asked)
    continue_generation(scheduler, asked)
    step(worker)
    assert shown(worker)[0] == pytest.approx(milliseconds)
