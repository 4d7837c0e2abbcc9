"""A draft KV cache with fewer entries than the target's pool has slots: new entries overwrite the
oldest that no running request reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.drafting.kv import DraftKVCache, Tags


class RingKVCache(DraftKVCache):
    """`num_entries` entries over the slots of the target's pool.

    New entries take the next unused ones of a ring; if these are too few, the oldest of all. In use
    is what the newest table found, and what was written since. `entry_of[target slot]` and
    `owner[entry]` point at each other while an entry lives; if the entry is overwritten or
    forgotten, they disagree.
    """

    tags: Tags

    def __init__(
        self,
        num_entries: int,
        num_target_slots: int,
        kv_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        scratch: int = 0,
    ) -> None:
        super().__init__(num_entries, kv_shape, dtype, device, scratch)
        self.tags = Tags(
            torch.full((num_target_slots,), num_entries, dtype=torch.int32, device=device),
            torch.full((num_entries + 1,), -1, dtype=torch.int32, device=device),
            torch.zeros(num_entries + 1, dtype=torch.bool, device=device),
        )
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)

    def place(
        self, target_slots: Tensor, live: Tensor | None = None, fair_share: int | None = None
    ) -> Tensor:
        padding, (entry_of, owner, in_use) = self.num_entries, self.tags
        unused = ~in_use[: self.num_entries]
        limit: Tensor | int = self.num_entries
        if fair_share is not None:
            limit = unused.sum().clamp(min=fair_share, max=self.num_entries)
        live = torch.ones_like(target_slots, dtype=torch.bool) if live is None else live
        order = live.cumsum(0)  # 1 for the first live token
        total = order[-1:]
        # Below 0 for the first `total - limit` live tokens, which do not fit.
        rank = order - 1 - (total - limit).clamp(min=0)
        placed = live & (rank >= 0)
        entries = self._next_entries(unused, rank, total.clamp(max=limit))
        entries = torch.where(placed, entries, padding)
        owner[entries] = target_slots.int()
        # `owner[padding] = -1` would copy a host scalar to the device.
        owner[padding:].fill_(-1)
        entry_of[target_slots] = entries.int()
        in_use.index_fill_(0, entries, True)
        advance = torch.where(placed, (entries - self.cursor) % self.num_entries + 1, 0)
        self.cursor.add_(advance.amax(0, keepdim=True)).remainder_(self.num_entries)
        return torch.where(placed, entries, -1)

    def _next_entries(self, unused: Tensor, rank: Tensor, total: Tensor) -> Tensor:
        """Return, from the cursor on, the `rank`-th `[N]` of the `unused` entries, bool
        `[num_entries]`; of all entries if fewer than `total` `[1]` are unused."""
        free = unused | (unused.sum() < total.clamp(min=1))
        upto = free.cumsum(0)
        before = upto.index_select(0, self.cursor) - free.index_select(0, self.cursor).long()
        return torch.searchsorted(upto, (before + rank) % upto[-1:] + 1)

    def prompt_tokens_to_write(self, visible: Tensor, age: Tensor) -> Tensor | slice:
        chosen = visible.nonzero()[:, 0]
        # Newest last: of a write that does not fit, the last tokens stay.
        return chosen[age[chosen].argsort(descending=True, stable=True)]

    def live_share(self) -> float:
        owner = self.tags.owner[: self.num_entries]
        entries = torch.arange(self.num_entries, device=owner.device)
        live = (owner >= 0) & (self.tags.entry_of[owner.clamp(min=0).long()] == entries)
        return live.float().mean().item()

    def clear(self) -> None:
        super().clear()
        self.tags.owner.fill_(-1)
        self.tags.in_use.zero_()
        self.cursor.zero_()
