"""An extension of our worker that fails: once the file FAULT_AT exists, the next decode step raises
in the phase FAULT_IN (propose, verify or commit)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.serving.step.extension import Extension

PHASES = ("propose", "verify", "commit")


class Fault(RuntimeError):
    """What is raised."""


def fail_in(phase: str) -> None:
    if os.environ["FAULT_IN"] == phase and Path(os.environ["FAULT_AT"]).exists():
        raise Fault(f"in {phase}")


class FaultyDrafter(Drafter):
    def propose(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        fail_in("propose")
        return super().propose(bonus, requests)

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        keep: Tensor | None = None,
        quota: int | None = None,
    ) -> None:
        if keep is not None:  # Not of a prompt.
            fail_in("commit")
        super().absorb(target_hidden, positions, slots, keep, quota)


def extension(target_worker: Any) -> Extension:
    forward = target_worker.forward_batch_generation

    def verify(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_verify"):
            fail_in("verify")
        return forward(*args, **kwargs)

    target_worker.forward_batch_generation = verify
    return Extension(make_drafter=FaultyDrafter)
