"""What an operator can see of the worker: acceptance counts and phase times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class PrometheusCounters:
    """Acceptance counters in /metrics, with the labels of SGLang's own series."""

    def __init__(self, labels: Mapping[str, Any], block_size: int) -> None:
        # Imported late: SGLang first sets the directory in which its processes share metrics.
        from prometheus_client import Counter

        def counter(name: str, what: str, *more: str) -> Any:
            return Counter(f"sglang_dflash_{name}", what, [*labels, *more])

        steps = counter("verify_steps", "Verify steps, one per request and forward.")
        tokens = counter(
            "committed_tokens", "Tokens that verify steps committed, bonus tokens included."
        )
        accepted = counter(
            "accepted_drafts",
            "Verify steps in which the drafted token at this position was accepted.",
            "position",
        )
        self._steps, self._tokens = steps.labels(**labels), tokens.labels(**labels)
        self._accepted = [accepted.labels(**labels, position=i) for i in range(1, block_size)]

    def add(self, accepted_drafts: list[int]) -> None:
        self._steps.inc(len(accepted_drafts))
        self._tokens.inc(len(accepted_drafts) + sum(accepted_drafts))
        for position in range(max(accepted_drafts, default=0)):
            self._accepted[position].inc(sum(n > position for n in accepted_drafts))


def prometheus_counters(
    labels: Mapping[str, Any] | None, block_size: int
) -> PrometheusCounters | None:
    """Counters with these labels; None if this process has no series (`labels` None)."""
    return None if labels is None else PrometheusCounters(labels, block_size)


@dataclass
class AcceptanceCounts:
    """Drafted tokens that verify steps accepted, counted on the host from what the scheduler reads
    anyway."""

    block_size: int
    prometheus: PrometheusCounters | None = None
    by_length: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_length = [0] * self.block_size

    def add(self, accepted_drafts: list[int]) -> None:
        for n in accepted_drafts:
            self.by_length[n] += 1
        if self.prometheus is not None:
            self.prometheus.add(accepted_drafts)

    def report(self) -> dict[str, Any]:
        """Steps, acceptance length (mean tokens committed per step, bonus token included), and the
        share of steps that accepted the drafted token, by position."""
        steps = sum(self.by_length)
        if not steps:
            return {"verify_steps": 0, "acceptance_length": None, "acceptance_by_position": []}
        committed = sum((n + 1) * count for n, count in enumerate(self.by_length))
        by_position = [sum(self.by_length[n:]) / steps for n in range(1, self.block_size)]
        return {
            "verify_steps": steps,
            "acceptance_length": round(committed / steps, 4),
            "acceptance_by_position": [round(share, 4) for share in by_position],
        }


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
            "decode_steps": max(self.calls.values(), default=0),
            "host_seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        }


def add_report(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """After SGLang has added its speculative figures to the state that /server_info shows: ours."""
    report = getattr(controller.scheduler.draft_worker, "report", None)
    if report is not None:
        state["dflash"] = report()
