"""What the drafter is made of: its cache, attention and the check of its operations; and what it
takes from the target and its server: embedding, lm_head, ranks, dtypes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import (
    get_model,
    get_observability,
    get_parallel,
    get_serving,
    get_spec,
)
from torch import Tensor

from sglang_dflash.drafting.attention.backend import Backend, DraftAttention, Setting
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.heads import TargetHead
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.direct import DirectKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.self_check import check_attention, check_ops
from sglang_dflash.serving.gpu.backends import kv_dtype

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
        return DirectKVCache(target_slots, shape, self.kv_dtype, self.device, scratch)

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
                compacts = self.backend.capabilities.scratch
                block, reach = self.options.block_size, self.options.reach
                check_attention(self.model, block, attention, cache.kv, compacts, reach)
                checked.append(type(attention).__name__)
        if checked:
            milliseconds = 1000 * (time.perf_counter() - began)
            names = ", ".join(checked)
            logger.info("DFLASH: self-check: as torch in %.0f ms: %s", milliseconds, names)


def tensor_parallel() -> TensorParallel:
    """The target's tensor-parallel group, over which the drafter is sharded too."""
    group = get_parallel().tp_group

    def all_gather(x: Tensor) -> Tensor:
        return group.all_gather(x[None].contiguous(), dim=0)

    def from_first(number: int) -> int:
        if group.world_size == 1:
            return number
        shared = torch.tensor(number)
        torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
        return int(shared)

    return TensorParallel(
        group.rank_in_group, group.world_size, group.all_reduce, all_gather, from_first
    )


def target_head(model: Any) -> TargetHead:
    """The target's embedding and lm_head, without LoRA: the drafter is one for all requests."""
    embed = unwrap_lora_layer(model.get_input_embeddings())
    lm_head = unwrap_lora_layer(model.lm_head)
    # This rank's rows [V / size, E] without padding, and the token id of the first.
    shard = lm_head.shard_indices
    weight, first_id = lm_head.weight[: shard.num_org_elements], shard.org_vocab_start_index
    return TargetHead(embed, lambda hidden: hidden @ weight.T, first_id)


def unserved_target(model: Any) -> str | None:
    """Why the drafter cannot borrow from the loaded target, or None. It needs a dense lm_head."""
    lm_head = unwrap_lora_layer(getattr(model, "lm_head", None))
    weight = getattr(lm_head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        found = "missing" if weight is None else weight.dtype
        return f"the target's lm_head: {found}, a dense 16- or 32-bit weight is needed"
    if not hasattr(lm_head, "shard_indices"):
        return (
            f"the target's lm_head: {type(lm_head).__name__}, one of SGLang's "
            "vocabulary-parallel layers is needed"
        )
    return None


def draft_kv_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of draft K/V in a scheduler process (`gpu.backends.kv_dtype`)."""
    spec = get_spec()
    return kv_dtype(
        get_model().kv_cache_dtype,
        spec.speculative_draft_kv_cache_dtype,
        spec.speculative_draft_attention_backend,
        model_dtype,
    )


def metric_labels() -> dict[str, Any] | None:
    """Labels of this process's series in /metrics; None without --enable-metrics and on every rank
    but the first."""
    parallel, observed = get_parallel(), get_observability()
    if not observed.enable_metrics or parallel.tp_rank > 0:
        return None
    labels = {"model_name": get_serving().served_model_name, "tp_rank": parallel.tp_rank}
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    return {**labels, **(observed.extra_metric_labels or {})}
