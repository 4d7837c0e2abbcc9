"""What the watch logs, once, and what it shows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.acceptance_length import JUDGED_STEPS
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.serving.show.counts import DraftWatch, RequestStep


class Fed:
    """A watch, its counters, and what it has logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture, **kwargs: Any) -> None:
        self.counters, self._caplog = DraftCounters("cpu"), caplog
        self.watch = DraftWatch(self.counters, 416, **kwargs)

    def step(self, steps: int, length: float, nonfinite: int = 0, found: float = 1.0) -> None:
        self.counters.add_nonfinite(torch.ones(nonfinite, dtype=torch.bool))
        columns = torch.arange(100, dtype=torch.int32)
        entries = columns.where(columns < 100 * found, -1)[None]
        self.counters.add_context(torch.tensor([100]), entries)
        self.counters.send()
        self.watch.add([RequestStep(7, round(length) - 1, round(length))] * steps)

    @property
    def logged(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.levelno == logging.WARNING]


def test_a_useful_draft_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog)
    for _ in range(8):
        fed.step(JUDGED_STEPS // 2, 3.0)
    assert fed.logged == []
    assert not fed.watch.alarm.raised and fed.watch.recent_acceptance_length == 3.0
    assert fed.watch.health.nonfinite == 0 and fed.watch.context_share == 1.0


def test_drafts_of_no_use_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog)
    for _ in range(8):
        fed.step(JUDGED_STEPS // 2, 1.0)
    (warning,) = fed.logged
    assert "acceptance length 1.00" in warning and "sglang-dflash doctor" in warning
    assert fed.watch.alarm.raised


def test_a_draft_that_is_not_finite_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog)
    for _ in range(8):
        fed.step(1, 1.0, nonfinite=7)
    (warning,) = fed.logged
    assert "NaN or Inf" in warning
    assert fed.watch.health.nonfinite == 56


def test_a_cache_that_is_too_small_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog)
    for _ in range(8):
        fed.step(JUDGED_STEPS // 2, 3.0, found=0.5)
    (warning,) = fed.logged
    assert "held 50% of the context" in warning
    assert "--speculative-dflash-draft-kv-tokens (now 416)" in warning
    assert fed.watch.context_share == 0.5


def test_a_few_steps_are_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A prefix that another request has left is not complete at first."""
    fed = Fed(caplog)
    fed.step(JUDGED_STEPS - 1, 1.0, found=0.0)
    assert fed.logged == []


def test_other_ranks_do_not_log(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog, speaks=False)
    fed.step(JUDGED_STEPS, 1.0, nonfinite=1, found=0.0)
    assert fed.logged == [] and fed.watch.alarm.raised


def test_only_steps_with_drafts_reach_it(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog)
    fed.watch.add([RequestStep(0, 0, 1)] * (2 * JUDGED_STEPS))
    assert fed.watch.alarm.recent is None
    fed.watch.add([RequestStep(7, 0, 1), RequestStep(7, 2, 3)] * JUDGED_STEPS)
    assert fed.watch.alarm.recent == 2.0
