"""Context of plain decoding steps, on its way to the drafter.

A step that drafts nothing still commits a token that later drafts are to see. Projecting each one
where it arises would launch a projection per step for a token per request. Here their hidden states
wait, and are projected together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from sglang_dflash.drafting.drafter import Proposer


class PendingContext:
    """Hidden states of plain decoding steps that the drafter has not absorbed yet.

    A slot may only be written while it is the same token's. It can become another's when the batch
    changes, or by a prefill: everything must be absorbed before.
    """

    def __init__(self, drafter: Proposer, most_waiting_steps: int) -> None:
        self._drafter, self._most_waiting_steps = drafter, most_waiting_steps
        self._rids: list[Hashable] = []
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(
        self,
        rids: Sequence[Hashable],
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        """Keep one token of each request.

        Args:
            rids: ids of the R requests.
            target_hidden: `[R, F * E]`, see `Proposer.absorb`. A captured graph may overwrite it.
            positions, slots: int64 `[R, 1]`.
        """
        rids = list(rids)
        if rids != self._rids:
            self.absorb()
            self._rids = rids
        self._waiting.append((target_hidden.clone(), positions.flatten(), slots.flatten()))
        if len(self._waiting) >= self._most_waiting_steps:
            self.absorb()

    def absorb(self) -> bool:
        """Pass on what waits, in the order in which it was committed. Returns whether there was
        anything."""
        waited = bool(self._waiting)
        if waited:
            hidden, positions, slots = (
                torch.cat(parts) for parts in zip(*self._waiting, strict=True)
            )
            self._waiting.clear()
            self._drafter.absorb(hidden, positions, slots)
        return waited

    def clear(self) -> None:
        """Forget what waits: the cache has been emptied."""
        self._waiting.clear()
