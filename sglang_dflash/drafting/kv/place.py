"""Entries of a ring for new tokens, as torch computes them. `dflash_kernels.place` is the same as
Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_dflash.drafting.kv import Tags

PlaceInRing = Callable[[Tags, Tensor, Tensor, Tensor | None, int | None], Tensor]


def place_in_ring(
    tags: Tags, cursor: Tensor, target_slots: Tensor, live: Tensor | None, fair_share: int | None
) -> Tensor:
    """Give entries of a ring to tokens; see `DraftKVCache.place` for the rest.

    Args:
        tags: of the ring, changed in place.
        cursor: int64 `[1]`, the entry from which the next ones are taken; moved in place.
    """
    entry_of, owner, in_use = tags
    padding = num_entries = len(owner) - 1
    unused = ~in_use[:num_entries]
    limit: Tensor | int = num_entries
    if fair_share is not None:
        limit = unused.sum().clamp(min=fair_share, max=num_entries)
    live = torch.ones_like(target_slots, dtype=torch.bool) if live is None else live
    order = live.cumsum(0)  # 1 for the first live token
    total = order[-1:]
    # Below 0 for the first `total - limit` live tokens, which do not fit.
    rank = order - 1 - (total - limit).clamp(min=0)
    placed = live & (rank >= 0)
    entries = _next_entries(unused, cursor, rank, total.clamp(max=limit))
    entries = torch.where(placed, entries, padding)
    owner[entries] = target_slots.int()
    # `owner[padding] = -1` would copy a host scalar to the device.
    owner[padding:].fill_(-1)
    entry_of[target_slots] = entries.int()
    in_use.index_fill_(0, entries, True)
    advance = torch.where(placed, (entries - cursor) % num_entries + 1, 0)
    cursor.add_(advance.amax(0, keepdim=True)).remainder_(num_entries)
    return torch.where(placed, entries, -1)


def _next_entries(unused: Tensor, cursor: Tensor, rank: Tensor, total: Tensor) -> Tensor:
    """Return, from the cursor on, the `rank`-th `[N]` of the `unused` entries, bool
    `[num_entries]`; of all entries if fewer than `total` `[1]` are unused."""
    free = unused | (unused.sum() < total.clamp(min=1))
    upto = free.cumsum(0)
    before = upto.index_select(0, cursor) - free.index_select(0, cursor).long()
    return torch.searchsorted(upto, (before + rank) % upto[-1:] + 1)
