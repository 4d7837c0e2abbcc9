"""Draft K/V as a cache keyed by the token's slot in the target's KV pool.

Because the key is the target's slot, shared prefixes, prefix-cache hits, retraction and eviction need no code here: whoever
reads a target slot finds the draft K/V of the token in it, or learns that it is gone. Gone costs acceptance, never exactness.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftKVCache:
    """A ring of `num_slots` draft K/V entries over the slots of the target's pool.

    New entries overwrite the oldest of those that no request reads; where these are too few, the oldest of all. Read is what the
    newest `gather` found, and what was written since. `slot_of[target slot]` and `owner[draft slot]` point at each
    other while an entry lives; an overwritten or forgotten one is seen by their disagreement. Nothing here reads a device value
    on the host.
    """

    keeps_everything = False

    def __init__(
        self,
        num_slots: int,
        num_target_slots: int,
        kv_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`kv_shape`: K/V of one token, `(layers, 2, kv heads, head dim)`. One more row takes the writes that nobody keeps."""
        self.num_slots = num_slots
        self.entries = torch.zeros(num_slots + 1, *kv_shape, dtype=dtype, device=device)
        self.owner = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        self.in_use = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.slot_of = torch.full((num_target_slots,), num_slots, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the K/V entries."""
        return self.entries.nbytes

    def write(
        self, target_slots: Tensor, kv: Tensor, keep: Tensor | None = None, share: int | None = None
    ) -> None:
        """Enter tokens in order; of more than there is room for, the last ones stay.

        Args:
            target_slots: int64 `[N]`, distinct among the kept ones.
            kv: `[N, L, 2, G, D]`.
            keep: bool `[N]`; a token that is not kept is marked dead. None keeps all.
            share: take what is not in use, or so many entries if that is more; None: take what is needed.
        """
        nowhere = self.num_slots
        free = ~self.in_use[: self.num_slots]
        room = (
            free.sum().clamp(min=share, max=self.num_slots) if share is not None else self.num_slots
        )
        keep = torch.ones_like(target_slots, dtype=torch.bool) if keep is None else keep
        order = keep.cumsum(0)  # 1 for the first kept token
        total = order[-1:]
        rank = order - 1 - (total - room).clamp(min=0)
        keep = keep & (rank >= 0)
        slots = torch.where(keep, self._next_slots(free, rank, total.clamp(max=room)), nowhere)
        self.entries[slots] = kv.to(self.entries.dtype)
        self.owner[slots] = target_slots.int()
        self.owner[nowhere] = -1
        self.slot_of[target_slots] = slots.int()
        self.in_use.index_fill_(0, slots, True)
        advance = torch.where(keep, (slots - self.cursor) % self.num_slots + 1, 0).amax(
            0, keepdim=True
        )
        self.cursor.add_(advance).remainder_(self.num_slots)

    def _next_slots(self, free: Tensor, rank: Tensor, total: Tensor) -> Tensor:
        """From the cursor on, the `rank`-th `[N]` of the `free` entries `[num_slots]`; of all, if those are fewer than `total` `[1]`."""
        free = free | (free.sum() < total.clamp(min=1))
        upto = free.cumsum(0)
        before = upto.index_select(0, self.cursor) - free.index_select(0, self.cursor).long()
        return torch.searchsorted(upto, (before + rank) % upto[-1:] + 1)

    def forget(self, target_slots: Tensor) -> None:
        """Mark tokens dead: their target slots were taken over by tokens that are not worth an entry."""
        self.slot_of.index_fill_(0, target_slots, self.num_slots)

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Target slots int64 `[...]` to draft slots `[...]` and whether each entry is live, bool `[...]`."""
        slots = self.slot_of[target_slots].long()
        return slots, self.owner[slots] == target_slots

    def gather(self, target_slots: Tensor, wanted: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Read all that the running requests see now; until the next `gather`, that is what is overwritten last.

        Args:
            target_slots: int64 `[R, C]`.
            wanted: bool `[R, C]`, False where a request has no token.
            room: rows that the caller will fill.

        Returns:
            entries `[R, C + room, L, 2, G, D]`, a copy whose last `room` rows are free; and bool `[R, C]`, wanted and live.
        """
        slots, live = self.find(target_slots)
        live = live & wanted
        self._mark(slots, live)
        free = slots.new_full((1, 1), self.entries.shape[0] - 1).expand(len(slots), room)
        rows = torch.cat((slots, free), dim=1)
        return self.entries.index_select(0, rows.flatten()).unflatten(0, rows.shape), live

    def _mark(self, slots: Tensor, live: Tensor) -> None:
        self.in_use.zero_()
        self.in_use.index_fill_(0, torch.where(live, slots, self.num_slots).flatten(), True)

    def live_share(self) -> float:
        """Share of the entries that a reader would still find. Reads the device: for reports, not for the step."""
        owner = self.owner[: self.num_slots]
        alive = (owner >= 0) & (
            self.slot_of[owner.clamp(min=0).long()]
            == torch.arange(self.num_slots, device=owner.device)
        )
        return alive.float().mean().item()

    def clear(self) -> None:
        """Forget everything."""
        self.slot_of.fill_(self.num_slots)
        self.owner.fill_(-1)
        self.in_use.zero_()
        self.cursor.zero_()


class IdentityDraftKVCache(DraftKVCache):
    """One entry per target slot: every token is written where it stands, and none is ever lost.

    For drafts without a window, and for bounds that the target's pool does not exceed.
    """

    keeps_everything = True

    def __init__(
        self,
        num_target_slots: int,
        kv_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_slots = num_target_slots
        # Finite from the start: an entry that nobody wrote is masked, and 0 times NaN would not be.
        self.entries = torch.zeros(num_target_slots + 1, *kv_shape, dtype=dtype, device=device)

    def write(
        self, target_slots: Tensor, kv: Tensor, keep: Tensor | None = None, share: int | None = None
    ) -> None:
        if keep is not None:
            target_slots = torch.where(keep, target_slots, self.num_slots)
        self.entries[target_slots] = kv.to(self.entries.dtype)

    def forget(self, target_slots: Tensor) -> None:
        raise NotImplementedError("every token has its entry")

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        return target_slots, torch.ones_like(target_slots, dtype=torch.bool)

    def _mark(self, slots: Tensor, live: Tensor) -> None:
        """Nothing is overwritten."""

    def live_share(self) -> float:
        return 1.0

    def clear(self) -> None:
        """Nothing to forget: an entry is read only for a target slot that was written since."""
