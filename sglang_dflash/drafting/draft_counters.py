"""Counters of drafting on the device, and their copy on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.table import ContextTable


class DraftCounts(NamedTuple):
    """Totals since the start.

    Attributes:
        nonfinite: what the draft computed that held NaN or Inf: the logits of a drafted token, or
            the features of a committed one, which its K/V is projected from. (An overflow of that
            product itself is only clamped, by `store_`.)
        context_sought: context tokens that drafts were to see, one per token, request, block and
            ring.
        context_found: those of them whose K/V the draft KV cache held.
        drafted_steps, drafted_accepted: with lookup, steps of a request whose drafts came from the
            draft, and accepted drafts of theirs.
        lookup_steps, lookup_accepted: of those whose drafts were looked up.
    """

    nonfinite: int = 0
    context_sought: int = 0
    context_found: int = 0
    # In this order, for `DraftCounters.by_source`.
    drafted_steps: int = 0
    drafted_accepted: int = 0
    lookup_steps: int = 0
    lookup_accepted: int = 0

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        return DraftCounts(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def steps_by_source(self) -> dict[str, int]:
        """Steps of a request by where its drafts came from, of requests that have ended, too."""
        return {"draft": self.drafted_steps, "lookup": self.lookup_steps}

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Accepted drafts of these."""
        return {"draft": self.drafted_accepted, "lookup": self.lookup_accepted}

    @property
    def context_share(self) -> float | None:
        """Share of the context that drafts found; None if they sought none."""
        return self.context_found / self.context_sought if self.context_sought else None


class DraftCounters:
    """Adds on the device without a synchronization; the host reads what `send` has copied."""

    def __init__(self, device: torch.device | str, pinned: bool | None = None) -> None:
        """`pinned`: whether the host's copy is in pinned memory; by default if there is a GPU."""
        self.device = device = torch.device(device)
        self._totals = torch.zeros(len(DraftCounts._fields), dtype=torch.int64, device=device)
        host = torch.zeros(len(self._totals), dtype=torch.int64)
        if pinned is None:
            pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = host.pin_memory() if pinned else host

    def add_nonfinite(self, mask: Tensor) -> None:
        """Count the True elements of a bool mask."""
        self._total("nonfinite").add_(mask.sum())

    def add_context(self, table: ContextTable) -> None:
        """Count the tokens of a step's table, and those whose K/V it has."""
        entries, seq_lens = table
        self._total("context_sought").add_(seq_lens.clamp(max=entries.shape[1]).sum())
        self._total("context_found").add_((entries >= 0).sum())

    @property
    def by_source(self) -> Tensor:
        """Steps of a request and their accepted drafts, int64 `[2, 2]`, for `learn_source` to
        add to: a row for the draft, and one for lookup."""
        first = DraftCounts._fields.index("drafted_steps")
        return self._totals[first : first + 4].view(2, 2)

    def _total(self, name: str) -> Tensor:
        """The total on the device that is this field of `DraftCounts`."""
        return self._totals[DraftCounts._fields.index(name)]

    def clear(self) -> None:
        """Start again at zero."""
        self._totals.zero_()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Take back what is added meanwhile."""
        before = self._totals.clone()
        try:
            yield
        finally:
            self._totals.copy_(before)

    def send(self) -> None:
        """Start the copy to the host. It is complete when the device is done with this step."""
        self._host.copy_(self._totals, non_blocking=True)

    def read(self) -> DraftCounts:
        """The counts of a step that the device has finished, the newest or one shortly before."""
        return DraftCounts(*self._host.tolist())
