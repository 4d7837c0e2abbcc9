"""A draft KV cache with one entry per target slot: every token is written, none is ever lost."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.core.kv_cache.storage import store_


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
    ) -> None:
        """`kv_shape`: K/V of one token, `(L, 2, G, D)`."""
        self.num_entries = num_target_slots
        # Finite from the start: a masked entry still takes part in 0 times NaN.
        self.kv = torch.zeros(num_target_slots + 1, *kv_shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def write(
        self,
        target_slots: Tensor,
        kv: Tensor,
        keep: Tensor | None = None,
        quota: int | None = None,
    ) -> None:
        if keep is not None:
            target_slots = torch.where(keep, target_slots, self.num_entries)
        store_(self.kv, target_slots, kv)

    def forget(self, target_slots: Tensor) -> None:
        """Nothing to mark: every token is written before a draft reads it."""

    def find(self, target_slots: Tensor) -> tuple[Tensor, Tensor]:
        return target_slots, torch.ones_like(target_slots, dtype=torch.bool)

    def read(self, target_slots: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        return target_slots, visible

    def prompt_tokens_to_write(self, visible: Tensor, age: Tensor) -> Tensor | slice:
        return slice(None)

    def live_share(self) -> float:
        return 1.0

    def clear(self) -> None:
        """Nothing to forget: a slot is read only after it was written again."""
