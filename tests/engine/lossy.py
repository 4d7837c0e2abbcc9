"""An extension of our worker: its draft KV cache loses a random half of the entries per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.serving.step.extension import Extension


class LossyDrafter(Drafter):
    """Proposes from what is left of a bounded cache."""

    def propose(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        assert isinstance(self.cache, RingKVCache)
        owner = self.cache.owner
        owner[torch.rand(len(owner)) < 0.5] = -1
        return super().propose(bonus, requests)


def extension(target_worker: Any) -> Extension:
    del target_worker
    return Extension(make_drafter=LossyDrafter)
