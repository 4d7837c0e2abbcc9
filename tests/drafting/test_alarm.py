"""When the acceptance alarm is raised, when it ends, and how often it warns."""

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


def test_it_warns_once_with_likely_causes() -> None:
    alarm = AcceptanceAlarm()
    assert feed(alarm, JUDGED_STEPS - 16, 1.0) == [] and not alarm.raised and alarm.recent is None
    (warning,) = feed(alarm, 20 * JUDGED_STEPS, 1.0)
    assert "acceptance length 1.00 over the last 512 verify steps" in warning
    assert all(cause in warning for cause in CAUSES)
    assert alarm.raised and alarm.recent == 1.0


def test_it_judges_recent_steps_only() -> None:
    """A draft that was good for long, and no longer is."""
    alarm = AcceptanceAlarm()
    assert feed(alarm, 100 * JUDGED_STEPS, 5.0) == []
    assert len(feed(alarm, JUDGED_STEPS, 1.0)) == 1


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
    assert len(warnings) == 3


def test_a_large_batch_may_fill_several_windows() -> None:
    alarm = AcceptanceAlarm()
    assert alarm.add(VerifySteps(3 * JUDGED_STEPS, 3 * JUDGED_STEPS)) is not None
    assert alarm.recent == 1.0
