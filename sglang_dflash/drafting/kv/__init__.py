"""Draft K/V as a cache keyed by the token's slot in the target's KV pool.

Because the key is the target's slot, shared prefixes, prefix-cache hits, retraction and eviction
need no code here: a reader of a target slot finds the draft K/V of the token in it, or learns that
it is gone. A lost entry costs acceptance, never exactness.

`DraftKVCache` has an entry per target slot; `tagged` marks those without draft K/V, `ring` bounds
their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tags(NamedTuple):
    """Tags of a cache that may lack the K/V of a slot's token. An entry is live if `entry_of` and
    `owner` agree on it.

    Attributes:
        entry_of: int32 `[target slots]`, the entry of each slot.
        owner: int32 `[entries + 1]`, the target slot of each entry.
        in_use: bool `[entries + 1]`, the entries to be overwritten last.
    """

    entry_of: Tensor
    owner: Tensor
    in_use: Tensor


class DraftKVCache:
    """Draft K/V entries, found by target slot. Here an entry's number is the slot: every token is
    written, and none is ever lost.

    For layers that read the whole context, and in place of a ring that would be no smaller. There
    are no tags, so every token must be written: a skipped one would leave the K/V of the slot's
    last owner.

    Letters in shapes: N tokens, R requests, C context columns, L layers of the cache, G kv heads, D
    head dim. Target slots are int64. No method but `live_share` reads a device value on the host.

    Attributes:
        num_entries: entries that tokens may have.
        kv: `[num_entries + 1 + scratch, L, 2, G, D]`. Number `num_entries` is the *padding entry*:
            tags name it for slots without draft K/V. After it are scratch entries, for an attention
            backend. The last of all, number -1, is the *spare entry*: what is written for tokens
            that are not to be stored goes there. Without scratch entries it is the padding entry.
            No request sees what is written there. All entries but scratch are finite, whatever the
            draft computes: `store_` and its kernel (`write_context`) see to it, and other writers
            copy what these have written.
        tags: for the table of a step, which marks what it finds as in use; None if every token has
            draft K/V, at its target slot.
    """

    tags: Tags | None = None

    def __init__(
        self,
        num_entries: int,
        kv_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        scratch: int = 0,
    ) -> None:
        """`kv_shape`: K/V of one token, `(L, 2, G, D)`; `scratch`: more entries at the end."""
        self.num_entries = num_entries
        # Finite from the start: a masked entry still takes part in 0 times NaN.
        self.kv = torch.zeros(num_entries + 1 + scratch, *kv_shape, dtype=dtype, device=device)

    @property
    def has_holes(self) -> bool:
        """True if entries of committed tokens may be missing."""
        return self.tags is not None

    def place(
        self, target_slots: Tensor, live: Tensor | None = None, fair_share: int | None = None
    ) -> Tensor:
        """Enter tokens in order; the caller stores their K/V. If not all fit, the last ones stay.

        Args:
            target_slots: `[N]`, distinct among those of live tokens.
            live: bool `[N]`, False for tokens to mark dead; None if all are live.
            fair_share: entries that these tokens may take although fewer are unused. None takes as
                many as needed.

        Returns:
            int64 `[N]`, distinct entry numbers; -1 for a token that is not to be stored.
        """
        return target_slots if live is None else torch.where(live, target_slots, -1)

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Entry numbers int64 `[...]` of target slots, and whether each is live, bool."""
        if self.tags is None:
            return target_slots, torch.ones_like(target_slots, dtype=torch.bool)
        entries = self.tags.entry_of[target_slots].long()
        return entries, self.tags.owner[entries] == target_slots

    def forget(self, target_slots: Tensor) -> None:
        """Mark target slots `[N]` dead: they hold tokens whose K/V is not written yet, or never."""
        if self.tags is not None:
            self.tags.entry_of.index_fill_(0, target_slots, self.num_entries)

    def prompt_tokens_to_write(self, visible: Tensor, age: Tensor) -> Tensor | slice:
        """Return the prompt tokens to project, in the order in which to write them.

        Args:
            visible: bool `[N]` on the host, whether a draft of this request can ever see the token.
            age: int64 `[N]` on the host, tokens between it and its request's newest in the batch.

        Returns:
            Indices int64 `[M]` on the host; a slice if all are written in place.
        """
        return slice(None)

    def live_share(self) -> float:
        """Share of the entries that a reader would find. Synchronizes with the device."""
        return 1.0

    def clear(self) -> None:
        """Forget everything. Without tags a slot is read only after it was written again."""
        if self.tags is not None:
            self.tags.entry_of.fill_(self.num_entries)


def store_(cache: Tensor, entries: Tensor, kv: Tensor) -> None:
    """Write K/V into entries of a cache, in its dtype. What is written is finite: NaN becomes 0,
    and what is out of the dtype's range, infinity included, its largest number.

    A projection may overflow, and a cast to 8-bit floats makes NaN or infinity of what is out of
    their range. Attention multiplies masked entries by 0, and 0 times NaN would reach every request
    of the batch.

    Args:
        cache: `[S, L, 2, G, D]`.
        entries: int64 `[N]`; -1 is the spare entry (`DraftKVCache`).
        kv: `[N, L, 2, G, D]`, any float dtype.
    """
    limit = min(torch.finfo(dtype).max for dtype in (kv.dtype, cache.dtype))
    stored = kv.nan_to_num(0.0).clamp_(-limit, limit).to(cache.dtype)
    indexable(cache)[entries] = indexable(stored)


def indexable(kv: Tensor) -> Tensor:
    """Return 8-bit floats as bytes, which every device can index; other K/V as it is."""
    return kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
