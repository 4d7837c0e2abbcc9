"""Counters of decode steps, and the warnings that follow from them, each logged once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.acceptance_length import (
    JUDGED_STEPS,
    LOW_CONTEXT_SHARE,
    AcceptanceAlarm,
    VerifySteps,
)
from sglang_dflash.drafting.draft_counters import DraftCounters, DraftCounts
from sglang_dflash.drafting.options import Finding

logger = Log(__name__)


class RequestStep(NamedTuple):
    """Tokens that one request got from one decode step. See `drafting/acceptance_length.py`.

    Attributes:
        drafts: drafted tokens of the request that the step verified; 0 if it takes one token per
            step.
        accepted: drafts that the request keeps.
        tokens: all tokens that the request keeps, the bonus token included.
    """

    drafts: int
    accepted: int
    tokens: int


class AcceptanceCounts:
    """Steps and tokens of live requests since the start, as integers.

    Attributes:
        drafted: verify steps, with their tokens.
        undrafted: steps without drafts, with theirs.
        accepted: steps that accepted, and kept, the draft at each of the `verify_block - 1`
            positions.
    """

    def __init__(self, verify_block: int) -> None:
        self.drafted = self.undrafted = VerifySteps()
        self.accepted = [0] * (verify_block - 1)
        # Verify steps by the number of their drafts.
        self._steps: Counter[int] = Counter()

    def add(self, steps: Sequence[RequestStep]) -> None:
        drafted = [step for step in steps if step.drafts]
        tokens = sum(step.tokens for step in drafted)
        self.drafted += VerifySteps(len(drafted), tokens)
        others = sum(step.tokens for step in steps) - tokens
        self.undrafted += VerifySteps(len(steps) - len(drafted), others)
        self._steps.update(step.drafts for step in drafted)
        for accepted, count in Counter(step.accepted for step in drafted).items():
            for position in range(accepted):
                self.accepted[position] += count

    @property
    def acceptance_length(self) -> float | None:
        """Rounded to four digits; None without a step."""
        length = self.drafted.acceptance_length
        return None if length is None else round(length, 4)

    def by_position(self) -> list[float | None]:
        """Share of the steps with a draft at a position that accepted it; empty without a step."""
        shares: list[float | None] = []
        for position, accepted in enumerate(self.accepted if self._steps else ()):
            tried = sum(n for drafts, n in self._steps.items() if drafts > position)
            shares.append(round(accepted / tried, 4) if tried else None)
        return shares


class DraftWatch:
    """Looks at every decode step's counts, and logs each finding once.

    Attributes:
        alarm: whether drafts are of no use.
    """

    def __init__(
        self,
        counters: DraftCounters,
        draft_kv_entries: int,
        warnings: Sequence[Finding] = (),
        speaks: bool = True,
        verdict: Callable[[], str | None] = lambda: None,
    ) -> None:
        """
        Args:
            counters: the drafter's.
            draft_kv_entries: for the message.
            warnings: what was warned of at start-up, the likeliest causes of a low acceptance.
            speaks: whether to log; of the ranks of one server, one should.
            verdict: in words, that drafts do not pay; asked every `JUDGED_STEPS` until they do not.
        """
        self.alarm = AcceptanceAlarm()
        self._last_counts = self._window_start = DraftCounts()
        self._counters, self._speaks, self._entries = counters, speaks, draft_kv_entries
        self._steps = 0
        self._warned_of_context = False
        self._verdict, self._unjudged = verdict, 0
        self._likely_causes = "".join(f"; first of all, {warning.problem}" for warning in warnings)

    def add(self, steps: Sequence[RequestStep]) -> None:
        """Take in what live requests got from one decode step."""
        drafted = [step.tokens for step in steps if step.drafts]
        warning = self.alarm.add(VerifySteps(len(drafted), sum(drafted)))
        if warning is not None:
            self._warn(
                f"{warning}{self._likely_causes}. `sglang-dflash doctor URL` examines the server."
            )
        counts = self._counters.read()
        if counts.nonfinite and not self._last_counts.nonfinite:
            self._warn(
                "the draft's output is NaN or Inf. Such drafts are replaced and never accepted; "
                "outputs stay the target's. Likely causes: values that overflow "
                "(serve in bfloat16 or float32 if this is float16), or a broken draft checkpoint"
            )
        self._last_counts = counts
        self._steps += len(drafted)
        if self._steps >= JUDGED_STEPS:
            self._judge_context(counts - self._window_start)
            self._steps, self._window_start = 0, counts
        self._judge_times(len(steps))

    def _judge_context(self, recent: DraftCounts) -> None:
        share = recent.context_share
        if share is None or share >= LOW_CONTEXT_SHARE or self._warned_of_context:
            return
        self._warned_of_context = True
        self._warn(
            f"the draft KV cache held {share:.0%} of the context that recent drafts were to see, "
            f"which lowers acceptance: raise --speculative-dflash-draft-kv-tokens (now "
            f"{self._entries})"
        )

    def _judge_times(self, steps: int) -> None:
        """Tell once if drafts take more time than they save."""
        self._unjudged += steps
        if self._unjudged < JUDGED_STEPS:
            return
        self._unjudged, verdict = 0, self._verdict()
        if verdict is not None:
            self._verdict = lambda: None
            self._warn(f"{verdict}. `sglang-dflash doctor URL` tells from when they pay.")

    def _warn(self, message: str) -> None:
        if self._speaks:
            logger.warning("%s", message)

    @property
    def recent_acceptance_length(self) -> float | None:
        """Acceptance length of the verify steps judged last, rounded; None before."""
        return None if self.alarm.recent is None else round(self.alarm.recent, 4)
