"""A draft KV cache with fewer entries than the target's pool has slots: new entries overwrite the
oldest that no running request reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.drafting.kv import DraftKVCache, Tags
from sglang_dflash.drafting.kv.place import PlaceInRing, place_in_ring


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
        place: PlaceInRing = place_in_ring,
    ) -> None:
        super().__init__(num_entries, kv_shape, dtype, device, scratch)
        self.tags = Tags(
            torch.full((num_target_slots,), num_entries, dtype=torch.int32, device=device),
            torch.full((num_entries + 1,), -1, dtype=torch.int32, device=device),
            torch.zeros(num_entries + 1, dtype=torch.bool, device=device),
        )
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._place_in_ring = place

    def place(
        self, target_slots: Tensor, live: Tensor | None = None, fair_share: int | None = None
    ) -> Tensor:
        return self._place_in_ring(self.tags, self.cursor, target_slots, live, fair_share)

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
