"""Warnings about drafts that are of no use, from numbers that are on the host anyway."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafting.acceptance_length import (
    JUDGED_STEPS,
    LOW_CONTEXT_SHARE,
    AcceptanceAlarm,
    VerifySteps,
)
from sglang_dflash.drafting.draft_counters import DraftCounters, DraftHealth

logger = logging.getLogger(__name__)


class PrometheusAlarm:
    """The alarm in /metrics, with the labels of SGLang's own series."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        # Imported late: SGLang first sets the directory in which its processes share metrics.
        from prometheus_client import Counter, Gauge

        self._raised = Gauge(
            "sglang_dflash_acceptance_alarm",
            "1 while the acceptance length stays near 1, else 0.",
            [*labels],
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._nonfinite = Counter(
            "sglang_dflash_nonfinite_outputs",
            "Outputs of the draft that held NaN or Inf.",
            [*labels],
        ).labels(**labels)
        self._raised.set(0)

    def show(self, raised: bool, nonfinite: int) -> None:
        """Set the alarm, and count more outputs that were not finite."""
        self._raised.set(raised)
        self._nonfinite.inc(nonfinite)


class DraftWatch:
    """Looks at every decode step's counts, and logs each finding once."""

    def __init__(
        self,
        counters: DraftCounters,
        labels: Mapping[str, Any] | None = None,
        speaks: bool = True,
        draft_kv_entries: int | None = None,
    ) -> None:
        """
        Args:
            counters: the drafter's.
            labels: of this process's series in /metrics; None for none.
            speaks: whether to log; of the ranks of one server, one should.
            draft_kv_entries: for the message.
        """
        self.alarm = AcceptanceAlarm()
        self._counters, self._speaks, self._entries = counters, speaks, draft_kv_entries
        self._prometheus = None if labels is None else PrometheusAlarm(labels)
        self._seen = self._window_start = DraftHealth()
        self._steps = 0
        self._warned_of_context = False

    def add(self, steps: VerifySteps) -> None:
        """Take in the verify steps of one decode step."""
        warning = self.alarm.add(steps)
        if warning is not None:
            self._warn(f"{warning}. `sglang-dflash doctor URL` examines the server.")
        counts = self._counters.read()
        if counts.nonfinite and not self._seen.nonfinite:
            self._warn(
                "the draft's output is NaN or Inf. Such drafts are replaced and never accepted; "
                "outputs stay the target's. Likely causes: values that overflow "
                "(serve in bfloat16 or float32 if this is float16), or a broken draft checkpoint"
            )
        if self._prometheus is not None:
            self._prometheus.show(self.alarm.raised, (counts - self._seen).nonfinite)
        self._seen = counts
        self._steps += steps.steps
        if self._steps >= JUDGED_STEPS:
            self._judge_context(counts - self._window_start)
            self._steps, self._window_start = 0, counts

    def _judge_context(self, recent: DraftHealth) -> None:
        share = recent.context_share
        if share is None or share >= LOW_CONTEXT_SHARE or self._warned_of_context:
            return
        self._warned_of_context = True
        self._warn(
            f"the draft KV cache held {share:.0%} of the context that recent drafts were to see, "
            f"which lowers acceptance: raise --speculative-dflash-draft-kv-tokens (now "
            f"{self._entries}). If requests share long prompts, "
            "--speculative-dflash-recompute-tail computes again what was lost of them"
        )

    def _warn(self, message: str) -> None:
        if self._speaks:
            logger.warning("DFLASH: %s", message)

    def report(self) -> dict[str, Any]:
        """For /server_info."""
        counts, recent = self._counters.read(), self.alarm.recent
        share = counts.context_share
        return {
            "acceptance_alarm": self.alarm.raised,
            "recent_acceptance_length": None if recent is None else round(recent, 4),
            "nonfinite_outputs": counts.nonfinite,
            "draft_context_share": None if share is None else round(share, 4),
        }
