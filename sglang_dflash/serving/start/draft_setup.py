"""The drafter's cache and attention for one server, and the check of its operations at start-up."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from sglang_dflash.drafting.attention.backend import Backend, DraftAttention, Setting
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.self_check import Dead, check_attention, check_ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftSetup:
    """What the drafter is made of.

    Attributes:
        backend: of draft attention.
        kv_dtype: of the draft KV cache.
        running: --max-running-requests.
    """

    model: DraftModel
    options: ResolvedOptions
    backend: Backend
    tp: TensorParallel
    device: torch.device
    kv_dtype: torch.dtype
    running: int

    def cache(self, target_slots: int, rows: int, bounded: bool) -> DraftKVCache:
        """The draft KV cache beside a target pool of that many slots.

        Args:
            rows: requests that SGLang's request-to-token table holds.
            bounded: whether the target's pool was sized for a bounded cache.
        """
        shape, block = self.model.kv_shape, self.options.block_size
        scratch = rows * block if self.backend.capabilities.scratch else 0
        entries = self.options.draft_kv_entries(self.running)
        # A bound that the target's pool does not exceed saves nothing.
        if entries is not None and bounded and entries < target_slots:
            return RingKVCache(entries, target_slots, shape, self.kv_dtype, self.device, scratch)
        return DraftKVCache(target_slots, shape, self.kv_dtype, self.device, scratch)

    def attention(self, cache: DraftKVCache, rows: int, positions: int) -> DraftAttention:
        """Draft attention over `cache`; `rows` and `positions`: of the request-to-token table."""
        reach = self.options.reach
        setting = Setting(
            self.options.block_size,
            self.device,
            reach,
            tp=self.tp,
            requests=rows,
            columns=reach.of(positions),
            scratch=cache.num_entries + 1,
            holes=cache.is_bounded,
        )
        return self.backend.make(self.model.config, setting)

    def check(self, attention: DraftAttention, cache: DraftKVCache) -> None:
        """Compare operations and attention with torch's, if they are not torch's.

        Args:
            cache: empty; the attention may keep K/V at its end.

        Raises:
            SelfCheckFailed: one of them differs.
        """
        began = time.perf_counter()
        with torch.no_grad():
            checked = check_ops(self.model, self.options.block_size)
            if not isinstance(attention, TorchAttention):
                block, reach = self.options.block_size, self.options.reach
                dead: Dead = "any"
                if self.backend.capabilities.scratch:
                    dead = "oldest" if cache.is_bounded else "none"
                check_attention(self.model, block, attention, cache.kv, dead, reach)
                checked.append(type(attention).__name__)
        if checked:
            milliseconds = 1000 * (time.perf_counter() - began)
            names = ", ".join(checked)
            logger.info("DFLASH: self-check: as torch in %.0f ms: %s", milliseconds, names)
