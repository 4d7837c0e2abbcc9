"""The embedding and the lm_head that the drafter borrows of the loaded target."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.lora.layers import unwrap_lora_layer
from torch import Tensor, nn

from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.packed import packed_of
from sglang_dflash.drafting.parallel import TensorParallel


def target_head(model: Any, tp: TensorParallel) -> TargetHead:
    """The target's embedding and lm_head, without LoRA: the drafter is one for all requests.

    Args:
        tp: this rank of the group that the drafter is split over.
    """
    embed = unwrap_lora_layer(model.get_input_embeddings())
    lm_head = unwrap_lora_layer(model.lm_head)
    if _is_whole(lm_head):
        rows = len(lm_head.weight)
        first, end = tp.rank * rows // tp.size, (tp.rank + 1) * rows // tp.size
        return TargetHead(embed, lambda hidden: _dense(lm_head.weight[first:end], hidden), first)
    # This rank's columns [V / ranks] without padding, and the token id of the first.
    shard = lm_head.shard_indices
    columns, first_id = shard.num_org_elements, shard.org_vocab_start_index

    def logits(hidden: Tensor) -> Tensor:
        return _product(lm_head, hidden)[:, :columns]

    return TargetHead(embed, logits, first_id)


def unserved_target(model: Any) -> str | None:
    """The reason why the drafter cannot borrow from the loaded target, or None."""
    lm_head = unwrap_lora_layer(getattr(model, "lm_head", None))
    if not hasattr(lm_head, "shard_indices") and not _is_whole(lm_head):
        name = "missing" if lm_head is None else type(lm_head).__name__
        return f"the target's lm_head: {name}; needed: a vocabulary-parallel layer or an embedding"
    if packed_of(lm_head) is not None or _has_method(lm_head):
        return None
    weight = getattr(lm_head, "weight", None)
    if weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1:
        return None
    weight_type = "no" if weight is None else f"a {weight.dtype}"
    method = type(getattr(lm_head, "quant_method", None)).__name__
    return f"the target's lm_head: {weight_type} weight, which SGLang does not apply {method} to"


def _is_whole(lm_head: Any) -> bool:
    """Return whether every rank has the whole lm_head, as with Gemma 4, whose lm_head is a torch
    embedding."""
    return isinstance(lm_head, nn.Embedding)


def _dense(weight: Tensor, hidden: Tensor) -> Tensor:
    return hidden.to(weight.dtype) @ weight.T


def _product(lm_head: Any, hidden: Tensor) -> Tensor:
    """The logits `[N, V / ranks]` of hidden states `[N, E]`, padding included: of a quantized
    lm_head by its method, as SGLang's `LogitsProcessor._compute_lm_head` computes them; else in the
    weight's dtype, whatever the logits of the target are computed in."""
    packed = packed_of(lm_head)  # Packed anew if the target gets new weights.
    if packed is not None:
        return packed(hidden)
    if _has_method(lm_head):
        return lm_head.quant_method.apply(lm_head, hidden, None)
    return _dense(lm_head.weight, hidden)


def _has_method(lm_head: Any) -> bool:
    """Return whether the layer's quantization method computes the product, by SGLang's own rule. A
    GGUF head has no weight under that name."""
    method = getattr(lm_head, "quant_method", None)
    if hasattr(lm_head, "weight"):
        return should_apply_lm_head_quant_method(lm_head, method)
    return callable(getattr(method, "apply", None))
