"""The acceptance alarm: its begin, its end, and the number of its warnings."""

from __future__ import annotations

from sglang_dflash.drafting.acceptance_length import (
    CAUSES,
    JUDGED_STEPS,
    QUIET,
    AcceptanceAlarm,
    VerifySteps,
)


def feed(alarm: AcceptanceAlarm, steps: int, length: float, batch: int = 16) -> list[str]:
    """Warnings of `steps` verify steps of that acceptance length, a batch at a time."""
    warnings = [
        alarm.add(VerifySteps(batch, round(batch * length))) for _ in range(-(-steps // batch))
    ]
    return [warning for warning in warnings if warning is not None]


def test_between_the_bounds_it_stays_as_it_is() -> None:
    alarm = AcceptanceAlarm()
    feed(alarm, JUDGED_STEPS, 1.0)
    feed(alarm, JUDGED_STEPS, 1.375)
    assert alarm.raised
    feed(alarm, JUDGED_STEPS, 1.5)
    assert not alarm.raised
    feed(alarm, JUDGED_STEPS, 1.375)
    assert not alarm.raised


def test_it_may_warn_again_after_a_recovery_but_not_in_a_loop() -> None:
    alarm, warnings, steps = AcceptanceAlarm(), [], 3 * QUIET
    for _ in range(steps // (2 * JUDGED_STEPS)):
        warnings += feed(alarm, JUDGED_STEPS, 1.0)
        warnings += feed(alarm, JUDGED_STEPS, 3.0)
    assert len(warnings) == 3 and all(cause in warnings[0] for cause in CAUSES)


def test_a_large_batch_may_fill_several_windows() -> None:
    alarm = AcceptanceAlarm()
    assert alarm.add(VerifySteps(3 * JUDGED_STEPS, 3 * JUDGED_STEPS)) is not None
    assert alarm.recent == 1.0
