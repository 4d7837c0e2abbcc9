"""A bounded draft KV cache: new entries overwrite the oldest that no running request reads."""

from __future__ import annotations

import torch
from torch import Tensor


class RingKVCache:
    """`num_slots` entries over the slots of the target's pool (see `DraftKVCache`).

    New entries take the next unused ones of a ring; if these are too few, the oldest of all. In use
    is what the newest `read` found, and what was written since. `slot_of[target slot]` and
    `owner[entry]` point at each other while an entry lives; if the entry is overwritten or
    forgotten, they disagree.
    """

    is_bounded = True

    def __init__(
        self,
        num_slots: int,
        num_target_slots: int,
        kv_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`kv_shape`: K/V of one token, `(L, 2, G, D)`."""
        self.num_slots = num_slots
        self.entries = torch.zeros(num_slots + 1, *kv_shape, dtype=dtype, device=device)
        self.owner = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        self.in_use = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.slot_of = torch.full((num_target_slots,), num_slots, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes

    def write(
        self,
        target_slots: Tensor,
        kv: Tensor,
        keep: Tensor | None = None,
        quota: int | None = None,
    ) -> None:
        padding = self.num_slots
        unused = ~self.in_use[: self.num_slots]
        limit: Tensor | int = self.num_slots
        if quota is not None:
            limit = unused.sum().clamp(min=quota, max=self.num_slots)
        keep = torch.ones_like(target_slots, dtype=torch.bool) if keep is None else keep
        order = keep.cumsum(0)  # 1 for the first kept token
        total = order[-1:]
        rank = order - 1 - (total - limit).clamp(min=0)
        keep = keep & (rank >= 0)
        slots = torch.where(keep, self._next_slots(unused, rank, total.clamp(max=limit)), padding)
        self.entries[slots] = kv.to(self.entries.dtype)
        self.owner[slots] = target_slots.int()
        # `owner[padding] = -1` would copy a host scalar to the device.
        self.owner[padding:].fill_(-1)
        self.slot_of[target_slots] = slots.int()
        self.in_use.index_fill_(0, slots, True)
        advance = torch.where(keep, (slots - self.cursor) % self.num_slots + 1, 0)
        self.cursor.add_(advance.amax(0, keepdim=True)).remainder_(self.num_slots)

    def _next_slots(self, unused: Tensor, rank: Tensor, total: Tensor) -> Tensor:
        """From the cursor on, the `rank`-th `[N]` of the `unused` entries, bool `[num_slots]`; of
        all entries if the unused ones are fewer than `total` `[1]`."""
        free = unused | (unused.sum() < total.clamp(min=1))
        upto = free.cumsum(0)
        before = upto.index_select(0, self.cursor) - free.index_select(0, self.cursor).long()
        return torch.searchsorted(upto, (before + rank) % upto[-1:] + 1)

    def forget(self, target_slots: Tensor) -> None:
        self.slot_of.index_fill_(0, target_slots, self.num_slots)

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.slot_of[target_slots].long()
        return slots, self.owner[slots] == target_slots

    def read(self, target_slots: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        slots, live = self.find(target_slots)
        live = live & visible
        self.in_use.zero_()
        self.in_use.index_fill_(0, torch.where(live, slots, self.num_slots).flatten(), True)
        return slots, live

    def prompt_tokens_to_write(self, visible: Tensor, age: Tensor) -> Tensor | slice:
        chosen = visible.nonzero()[:, 0]
        # Newest last: of a write that does not fit, the last tokens stay.
        return chosen[age[chosen].argsort(descending=True, stable=True)]

    def live_share(self) -> float:
        owner = self.owner[: self.num_slots]
        entries = torch.arange(self.num_slots, device=owner.device)
        live = (owner >= 0) & (self.slot_of[owner.clamp(min=0).long()] == entries)
        return live.float().mean().item()

    def clear(self) -> None:
        self.slot_of.fill_(self.num_slots)
        self.owner.fill_(-1)
        self.in_use.zero_()
        self.cursor.zero_()
