"""What an operator can see of the worker: acceptance counts and phase times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.serving.show.watch import DraftWatch
from sglang_dflash.serving.step.target_tokens import takes_one_token


class RequestStep(NamedTuple):
    """What one request got from one decode step. See `core.acceptance_length`.

    Attributes:
        drafts: drafted tokens of the request that the step verified; 0 if it takes one token per
            step.
        accepted: drafts that the request keeps.
        tokens: all tokens that it keeps, the bonus token included.
    """

    drafts: int
    accepted: int
    tokens: int


class PrometheusCounters:
    """Acceptance counters in /metrics, with the labels of SGLang's own series."""

    def __init__(self, labels: Mapping[str, Any], block_size: int) -> None:
        # Imported late: SGLang first sets the directory in which its processes share metrics.
        from prometheus_client import Counter

        def counter(name: str, what: str) -> Any:
            return Counter(f"sglang_dflash_{name}", what, [*labels]).labels(**labels)

        self._steps = counter("verify_steps", "Verify steps, one per live request and forward.")
        self._tokens = counter(
            "committed_tokens", "Tokens kept from verify steps, bonus tokens included."
        )
        self._undrafted_steps = counter(
            "undrafted_steps", "Decode steps of live requests without drafts."
        )
        self._undrafted_tokens = counter("undrafted_tokens", "Tokens kept from undrafted steps.")
        accepted = Counter(
            "sglang_dflash_accepted_drafts",
            "Verify steps in which the drafted token at this position was accepted and kept.",
            [*labels, "position"],
        )
        self._accepted = [accepted.labels(**labels, position=i) for i in range(1, block_size)]

    def add(self, steps: Sequence[RequestStep]) -> None:
        drafted = [step for step in steps if step.drafts]
        undrafted = [step for step in steps if not step.drafts]
        # An increment is a write to a file: most steps have one of both kinds.
        if drafted:
            self._steps.inc(len(drafted))
            self._tokens.inc(sum(step.tokens for step in drafted))
        if undrafted:
            self._undrafted_steps.inc(len(undrafted))
            self._undrafted_tokens.inc(sum(step.tokens for step in undrafted))
        for position in range(max((step.accepted for step in drafted), default=0)):
            self._accepted[position].inc(sum(step.accepted > position for step in drafted))


def prometheus_counters(
    labels: Mapping[str, Any] | None, block_size: int
) -> PrometheusCounters | None:
    """Counters with these labels; None if this process has no series (`labels` None)."""
    return None if labels is None else PrometheusCounters(labels, block_size)


@dataclass
class DraftCounts:
    """Steps that verified the same number of drafts.

    `accepted[i]`: steps that accepted, and kept, the draft at position i + 1.
    """

    total: VerifySteps
    accepted: list[int]


def _no_one(_width: int, _accepted: Mapping[str, int]) -> None:
    """The default of `AcceptanceCounts.on_outcome`."""


@dataclass
class AcceptanceCounts:
    """Steps and tokens of live requests, by the number of drafts that a step verified.

    Attributes:
        on_outcome: called after each decode step with its width and the accepted drafts of each
            live request that takes drafts.
    """

    block_size: int
    prometheus: PrometheusCounters | None = None
    by_drafts: dict[int, DraftCounts] = field(default_factory=dict)
    watch: DraftWatch | None = None
    on_outcome: Callable[[int, Mapping[str, int]], None] = _no_one

    def add(self, steps: Sequence[RequestStep]) -> None:
        for step in steps:
            counts = self.by_drafts.get(step.drafts)
            if counts is None:
                counts = DraftCounts(VerifySteps(), [0] * step.drafts)
                self.by_drafts[step.drafts] = counts
            counts.total += VerifySteps(1, step.tokens)
            for position in range(step.accepted):
                counts.accepted[position] += 1
        if self.prometheus is not None:
            self.prometheus.add(steps)
        if self.watch is not None:
            drafted = [step for step in steps if step.drafts]
            self.watch.add(VerifySteps(len(drafted), sum(step.tokens for step in drafted)))

    def report(self) -> dict[str, Any]:
        """Totals since the start, as integers, and the ratios that follow from them."""
        drafted = [(n, counts) for n, counts in self.by_drafts.items() if n]
        total = sum((counts.total for _, counts in drafted), VerifySteps())
        undrafted = self.by_drafts[0].total if 0 in self.by_drafts else VerifySteps()
        length, accepted, shares = total.acceptance_length, [], []
        for position in range(self.block_size - 1 if drafted else 0):
            reached = [counts for n, counts in drafted if n > position]
            accepted.append(sum(counts.accepted[position] for counts in reached))
            tried = sum(counts.total.steps for counts in reached)
            shares.append(round(accepted[-1] / tried, 4) if tried else None)
        return {
            "verify_steps": total.steps,
            "committed_tokens": total.tokens,
            "acceptance_length": None if length is None else round(length, 4),
            "accepted_drafts": accepted,
            "acceptance_by_position": shares,
            "undrafted_steps": undrafted.steps,
            "undrafted_tokens": undrafted.tokens,
        }


def count_kept_tokens(original: Any, processor: Any, batch: Any, result: Any) -> None:
    """Around the scheduler's processing of a decode result: count what each live request got of it.

    SGLang itself skips requests that have finished or were retracted meanwhile, counts a step for
    the others (`spec_verify_ct`, which an answer's meta_info shows), and finds out how many of the
    accepted tokens they keep.
    """
    counts = getattr(processor.model_worker, "counts", None)
    if not isinstance(counts, AcceptanceCounts):
        original(processor, batch, result)
        return
    before = [(r.spec_verify_ct, r.spec_num_correct_drafts, len(r.output_ids)) for r in batch.reqs]
    original(processor, batch, result)
    steps, outcome, width = [], {}, result.speculative_num_draft_tokens
    for request, (step_count, correct, length) in zip(batch.reqs, before, strict=True):
        if request.spec_verify_ct == step_count:
            continue
        takes_drafts = not takes_one_token(request)
        drafts = width - 1 if takes_drafts else 0
        tokens = len(request.output_ids_through_stop) - length
        accepted = min(request.spec_num_correct_drafts - correct, tokens, drafts)
        steps.append(RequestStep(drafts, accepted, tokens))
        if takes_drafts:
            outcome[request.rid] = accepted
    counts.add(steps)
    counts.on_outcome(width, outcome)


class PhaseTimes:
    """Host time of the phases of decode steps; on an accelerator, the time to launch them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
        self.calls[phase] = self.calls.get(phase, 0) + 1

    def report(self) -> dict[str, Any]:
        """Decode steps (of a whole batch), and total seconds by phase."""
        return {
            "decode_steps": self.calls.get("verify", 0),
            "host_seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        }


def add_report(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """After SGLang has added its speculative figures to the state that /server_info shows: ours."""
    worker = controller.scheduler.draft_worker
    report = getattr(worker, "report", None)
    if report is not None:
        state["dflash"] = report()
    reason = getattr(worker, "builtin_reason", None)
    if reason is not None:
        state["dflash_builtin_reason"] = reason
