"""What the drafter takes from the target and its server: embedding, lm_head, ranks, dtypes."""

from __future__ import annotations

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

from sglang_dflash.drafting.heads import TargetHead
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.serving.gpu.backends import kv_dtype


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
