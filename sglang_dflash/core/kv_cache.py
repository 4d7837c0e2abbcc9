"""Draft K/V as a cache keyed by the token's slot in the target's KV pool.

Because the key is the target's slot, shared prefixes, prefix-cache hits, retraction and eviction need no code here: whoever
reads a target slot finds the draft K/V of the token in it, or learns that it is gone. Gone costs acceptance, never exactness.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftKVCache:
    """A ring of `num_slots` draft K/V entries over the slots of the target's pool.

    New entries overwrite the oldest. `slot_of[target slot]` and `owner[draft slot]` point at each other while an entry lives;
    an overwritten or forgotten one is seen by their disagreement. Nothing here reads a device value on the host.
    """

    def __init__(self, num_slots: int, kv_shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        """`kv_shape`: K/V of one token, `(layers, 2, kv heads, head dim)`. One more row takes the writes that nobody keeps."""
        self.num_slots = num_slots
        # Written through at once: a page that the system has only promised would escape the target's memory budget.
        self.entries = torch.empty(num_slots + 1, *kv_shape, dtype=dtype, device=device).zero_()
        self.owner = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)

    def attach(self, num_target_slots: int) -> None:
        """Learn the size of the target's pool, which is decided after this cache has taken its memory."""
        self.slot_of = torch.full((num_target_slots,), self.num_slots, dtype=torch.int32, device=self.owner.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the K/V entries."""
        return self.entries.nbytes

    def write(self, target_slots: Tensor, kv: Tensor, keep: Tensor | None = None) -> None:
        """Enter tokens in order; of more than the ring holds, the last ones stay.

        Args:
            target_slots: int64 `[N]`, distinct among the kept ones.
            kv: `[N, L, 2, G, D]`.
            keep: bool `[N]`; a token that is not kept is marked dead. None keeps all.
        """
        keep = torch.ones_like(target_slots, dtype=torch.bool) if keep is None else keep
        order = keep.cumsum(0)  # 1 for the first kept token
        total = order[-1:].sum()
        keep = keep & (order > total - self.num_slots)
        nowhere = self.num_slots
        slots = torch.where(keep, (self.cursor + order - 1) % self.num_slots, nowhere)
        self.entries[slots] = kv.to(self.entries.dtype)
        self.owner[slots] = target_slots.int()
        self.owner[nowhere] = -1
        self.slot_of[target_slots] = slots.int()
        self.cursor.add_(total).remainder_(self.num_slots)

    def forget(self, target_slots: Tensor) -> None:
        """Mark tokens dead: their target slots were taken over by tokens that are not worth an entry."""
        self.slot_of[target_slots] = self.num_slots

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Target slots int64 `[...]` to draft slots `[...]` and whether each entry is live, bool `[...]`."""
        slots = self.slot_of[target_slots].long()
        return slots, self.owner[slots] == target_slots

    def gather(self, target_slots: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Read `[R, C]` target slots: entries `[R, C + room, L, 2, G, D]`, the last `room` free for the caller, and liveness `[R, C]`."""
        slots, live = self.find(target_slots)
        free = slots.new_full((1, 1), self.entries.shape[0] - 1).expand(len(slots), room)
        rows = torch.cat((slots, free), dim=1)
        return self.entries.index_select(0, rows.flatten()).unflatten(0, rows.shape), live

    def live_share(self) -> float:
        """Share of the entries that a reader would still find. Reads the device: for reports, not for the step."""
        owner = self.owner[: self.num_slots]
        alive = (owner >= 0) & (self.slot_of[owner.clamp(min=0).long()] == torch.arange(self.num_slots, device=owner.device))
        return alive.float().mean().item()

    def clear(self) -> None:
        """Forget everything."""
        self.slot_of.fill_(self.num_slots)
        self.owner.fill_(-1)
        self.cursor.zero_()


class IdentityDraftKVCache(DraftKVCache):
    """One entry per target slot, for drafts without a window: every token is written where it stands, and none is ever lost."""

    def __init__(self, num_target_slots: int, kv_shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        self.num_slots = num_target_slots
        self.entries = torch.empty(num_target_slots + 1, *kv_shape, dtype=dtype, device=device)

    def attach(self, num_target_slots: int) -> None:
        raise NotImplementedError("built for the target's pool: its size is known")

    def write(self, target_slots: Tensor, kv: Tensor, keep: Tensor | None = None) -> None:
        if keep is not None:
            target_slots = torch.where(keep, target_slots, self.num_slots)
        self.entries[target_slots] = kv.to(self.entries.dtype)

    def forget(self, target_slots: Tensor) -> None:
        raise NotImplementedError("without a window every token is worth its entry")

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        return target_slots, torch.ones_like(target_slots, dtype=torch.bool)

    def live_share(self) -> float:
        return 1.0

    def clear(self) -> None:
        """Nothing to forget: an entry is read only for a target slot that was written since."""
