"""A draft KV cache with an entry per target slot, some of which hold tokens without draft K/V."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.kv import DraftKVCache, Tags


class TaggedKVCache(DraftKVCache):
    """An entry's number is the slot, and a tag tells whether it lives: tokens may come into a slot
    that no forward here has computed."""

    tags: Tags

    def __init__(self, num_entries: int, *shape: Any, **kwargs: Any) -> None:
        super().__init__(num_entries, *shape, **kwargs)
        device = self.kv.device
        dead = torch.full((num_entries,), num_entries, dtype=torch.int32, device=device)
        owner = torch.arange(num_entries + 1, dtype=torch.int32, device=device)
        owner[num_entries] = -1
        in_use = torch.zeros(num_entries + 1, dtype=torch.bool, device=device)
        self.tags = Tags(dead, owner, in_use)

    def place(
        self, target_slots: Tensor, live: Tensor | None = None, fair_share: int | None = None
    ) -> Tensor:
        entries = super().place(target_slots, live, fair_share)
        tags = torch.where(entries < 0, self.num_entries, entries)
        self.tags.entry_of[target_slots] = tags.int()
        return entries

    def live_share(self) -> float:
        return (self.tags.entry_of < self.num_entries).float().mean().item()
