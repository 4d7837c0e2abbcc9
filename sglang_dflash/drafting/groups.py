"""Draft layers with one reach, their KV cache and their attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerGroup, Reach
from sglang_dflash.drafting.attention.backend import DraftAttention
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.ops import context_table


class ContextWrite(NamedTuple):
    """The part of the absorbed tokens that a group writes.

    Attributes:
        tokens: int64 indices of the tokens, in the order in which they take entries; a slice for
            all.
        fair_share: see `DraftKVCache.place`.
    """

    tokens: Tensor | slice = slice(None)
    fair_share: int | None = None


ALL_TOKENS = ContextWrite()


@dataclass(frozen=True, eq=False)
class KVGroup:
    """Draft layers that read the same of a request.

    Attributes:
        layer_group: the layers' numbers and their reach.
        cache: their K/V.
        attention: over the cache; its layer 0 is the first of the group.
    """

    layer_group: LayerGroup
    cache: DraftKVCache
    attention: DraftAttention

    @property
    def reach(self) -> Reach:
        return self.layer_group.reach

    def fair_share(self, requests: int, carried: int) -> int:
        """Entries that `requests` requests may take of a ring that `carried` of them share."""
        return requests * self.cache.num_entries // carried

    def prepare(self, model: DraftModel, requests: RequestSlots, counters: DraftCounters) -> None:
        """Find the context of a step's requests, and hand it to the attention."""
        table = context_table(model.ops, requests, self.reach, self.cache.tags)
        if isinstance(self.cache, RingKVCache):
            counters.add_context(table)
        self.attention.prepare(self.cache.kv, table)

    def place(self, slots: Tensor, committed: Tensor | None, write: ContextWrite) -> Tensor:
        """Assign entries to tokens.

        Args:
            slots: int64 `[N]`.
            committed: bool `[N]`; None for all.
            write: the tokens that this group writes.

        Returns:
            int64 `[N]`; -1 for a token that is not to be stored.
        """
        tokens, fair_share = write
        if isinstance(tokens, slice):
            return self.cache.place(slots, committed, fair_share)
        entries = torch.full_like(slots, -1)
        if len(tokens):
            live = None if committed is None else committed[tokens]
            placed = self.cache.place(slots[tokens], live, fair_share)
            entries.index_copy_(0, tokens, placed)
        return entries

    def store(self, model: DraftModel, kv: Tensor, positions: Tensor, entries: Tensor) -> None:
        """Store K/V of tokens in entries.

        Args:
            kv: `[N, L, 2, G, D]`, of all draft layers, from `DraftModel.project_context`.
            positions: int64 `[N]`.
            entries: int64 `[N]`, from `place`.
        """
        for model_layers, cache_layers in self._layer_slices:
            cache_kv = self.cache.kv[:, cache_layers]
            model.write_context(kv[:, model_layers], model_layers, positions, cache_kv, entries)

    @cached_property
    def _layer_slices(self) -> list[tuple[slice, slice]]:
        """Adjacent layers, as slices of the draft's layers and of the group's: no K/V is copied."""
        numbers = self.layer_group.numbers
        starts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1)]
        return [
            (slice(numbers[first], numbers[end - 1] + 1), slice(first, end))
            for first, end in pairwise((*starts, len(numbers)))
        ]


def clear(groups: Sequence[KVGroup]) -> None:
    """Clear the caches of all groups."""
    for group in groups:
        group.cache.clear()
