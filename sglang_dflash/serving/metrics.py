"""What an operator can see of the worker: counts from verify, and the facts of its set-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AcceptanceCounts:
    """How many drafted tokens verify steps accepted, counted on the host from what the scheduler reads anyway."""

    block_size: int
    by_length: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_length = [0] * self.block_size

    def add(self, accepted_drafts: list[int]) -> None:
        for n in accepted_drafts:
            self.by_length[n] += 1

    def report(self) -> dict[str, Any]:
        """Steps, mean acceptance length (tokens committed per step, bonus included), and the share accepted by position."""
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


def add_report(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """Hook after SGLang has put its own speculative figures into the internal state that /server_info shows."""
    report = getattr(controller.scheduler.draft_worker, "report", None)
    if report is not None:
        state["dflash"] = report()
