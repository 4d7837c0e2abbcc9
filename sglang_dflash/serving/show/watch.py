"""Warnings about drafts that are of no use, from numbers that are on the host anyway."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_dflash.drafting.acceptance_length import (
    JUDGED_STEPS,
    LOW_CONTEXT_SHARE,
    AcceptanceAlarm,
    VerifySteps,
)
from sglang_dflash.drafting.draft_counters import DraftCounters, DraftHealth
from sglang_dflash.serving.show.counts import RequestStep

logger = logging.getLogger(__name__)


class DraftWatch:
    """Looks at every decode step's counts, and logs each finding once.

    Attributes:
        alarm: whether drafts are of no use.
    """

    def __init__(self, counters: DraftCounters, draft_kv_entries: int, speaks: bool = True) -> None:
        """
        Args:
            counters: the drafter's.
            draft_kv_entries: for the message.
            speaks: whether to log; of the ranks of one server, one should.
        """
        self.alarm = AcceptanceAlarm()
        self._seen = self._window_start = DraftHealth()
        self._counters, self._speaks, self._entries = counters, speaks, draft_kv_entries
        self._steps = 0
        self._warned_of_context = False

    def add(self, steps: Sequence[RequestStep]) -> None:
        """Take in what live requests got from one decode step."""
        drafted = [step.tokens for step in steps if step.drafts]
        warning = self.alarm.add(VerifySteps(len(drafted), sum(drafted)))
        if warning is not None:
            self._warn(f"{warning}. `sglang-dflash doctor URL` examines the server.")
        counts = self.health
        if counts.nonfinite and not self._seen.nonfinite:
            self._warn(
                "the draft's output is NaN or Inf. Such drafts are replaced and never accepted; "
                "outputs stay the target's. Likely causes: values that overflow "
                "(serve in bfloat16 or float32 if this is float16), or a broken draft checkpoint"
            )
        self._seen = counts
        self._steps += len(drafted)
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

    @property
    def health(self) -> DraftHealth:
        """What drafting counted on the device, until the last step or shortly before."""
        return self._counters.read()

    @property
    def recent_acceptance_length(self) -> float | None:
        """Of the verify steps that were judged last, rounded; None before."""
        return None if self.alarm.recent is None else round(self.alarm.recent, 4)

    @property
    def context_share(self) -> float | None:
        """Of the context that drafts were to see, what they found; None if it is not bounded."""
        share = self.health.context_share
        return None if share is None else round(share, 4)
