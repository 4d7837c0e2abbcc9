"""A draft KV cache with one entry per target slot: every token is written, none is ever lost."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.drafting.kv import RingTags, store_


class DirectKVCache:
    """Entry number = target slot (see `DraftKVCache`).

    For drafts without a window, and for bounds that the target's pool does not exceed. There are no
    tags, so every token must be written: a skipped one would leave the K/V of the slot's last
    owner.
    """

    is_bounded = False

    def __init__(
        self,
        num_target_slots: int,
        kv_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        scratch: int = 0,
    ) -> None:
        """`kv_shape`: K/V of one token, `(L, 2, G, D)`; `scratch`: more entries at the end."""
        self.num_entries = num_target_slots
        # Finite from the start: a masked entry still takes part in 0 times NaN.
        spare = 1 + scratch
        self.kv = torch.zeros(num_target_slots + spare, *kv_shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    @property
    def tags(self) -> RingTags | None:
        return None

    def place(
        self, target_slots: Tensor, keep: Tensor | None = None, quota: int | None = None
    ) -> Tensor:
        return target_slots if keep is None else torch.where(keep, target_slots, -1)

    def write(
        self,
        target_slots: Tensor,
        kv: Tensor,
        keep: Tensor | None = None,
        quota: int | None = None,
    ) -> None:
        # -1 is a spare entry.
        store_(self.kv, self.place(target_slots, keep), kv)

    def forget(self, target_slots: Tensor) -> None:
        """Nothing to mark: every token is written before a draft reads it."""

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        return target_slots, torch.ones_like(target_slots, dtype=torch.bool)

    def prompt_tokens_to_write(self, visible: Tensor, age: Tensor) -> Tensor | slice:
        return slice(None)

    def live_share(self) -> float:
        return 1.0

    def clear(self) -> None:
        """Nothing to forget: a slot is read only after it was written again."""
