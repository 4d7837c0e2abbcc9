"""SGLang's unquantized linear layers and lm_head with packed weights (`drafting/packed.py`).

What `--dtype` means on a plain CPU:

    float32    float32 weights and rows
    bfloat16   bfloat16 weights and rows
    float16    float16 weights, float32 rows: there are no float16 products on a CPU
    auto       bfloat16 with AMX, else float16: AVX-512's bfloat16 products read a single row's
               weights more slowly than FBGEMM does, and the answers are less exact
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, cast

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import Tensor, nn

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.packed import has_amx, pack, packed_of, packs_float16

logger = Log(__name__)

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def model_dtype(original: Any, config: Any, dtype: Any) -> torch.dtype:
    """Around the choice of a model's dtype: float32 if its weights will be packed in float16."""
    chosen = original(config, dtype)
    requested = dtype.lower() if isinstance(dtype, str) else dtype
    half = requested in ("half", "float16", torch.float16)
    slow = requested == "auto" and chosen in SIXTEEN_BITS and not has_amx()
    return torch.float32 if packs_float16() and (half or slow) else chosen


def pack_model(model: nn.Module, dtype_flag: str) -> None:
    """Pack a loaded model's weights in place. A tied embedding keeps its own weight beside the
    packed one.

    Args:
        dtype_flag: the value of `--dtype`.
    """
    float16 = dtype_flag.lower() != "float32"
    embedding = UnquantizedEmbeddingMethod
    embeddings = {
        id(layer.weight)
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), embedding)
        and type(layer) is not ParallelLMHead
    }
    for layer in list(model.modules()):
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, LinearBase) and type(method) is UnquantizedLinearMethod:
            layer.quant_method = PackedLinearMethod(float16, keeps=False)
        elif type(layer) is ParallelLMHead and type(method) is UnquantizedEmbeddingMethod:
            keeps = id(layer.weight) in embeddings
            layer.quant_method = PackedHeadMethod(float16, keeps)
        else:
            continue
        layer.quant_method.process_weights_after_loading(layer)
    head: Any = getattr(model, "lm_head", None)
    if type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod:
        # A tied lm_head is the embedding itself.
        head.quant_method = PackedHeadMethod(float16, keeps=True)
        head.quant_method.process_weights_after_loading(head)


class _PackingMethod:
    """Base of both methods: packs the weight each time it has been loaded.

    Args:
        float16: store float32 weights in 16 bits.
        keeps: keep the weight beside the packed one.
    """

    def __init__(self, float16: bool, keeps: bool) -> None:
        super().__init__()
        self.float16, self.keeps = float16, keeps

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer._parameters.get("weight")
        packed = None if weight is None else pack(weight.data, self.float16)
        if packed is None:
            return
        layer.__dict__["packed_weight"] = packed
        if not self.keeps:
            # Loaders read the weight's attributes, and some code reads the weight itself.
            layer.__dict__["loading_attributes"] = dict(vars(weight))
            del layer._parameters["weight"]
            layer.__class__ = _with_weight(cast(Hashable, type(layer)))

    def restore_weights_before_loading(self, layer: Any) -> None:
        if "packed_weight" in layer.__dict__:
            _ = layer.weight
            del layer.__dict__["packed_weight"]


class PackedLinearMethod(_PackingMethod, UnquantizedLinearMethod):
    """Linear method of a layer with a packed weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = layer.__dict__.get("packed_weight")
        return super().apply(layer, x, bias) if packed is None else packed(x, bias)


class PackedHeadMethod(_PackingMethod, UnquantizedEmbeddingMethod):
    """Embedding method of an lm_head with a packed weight."""


def head_logits(original: Any, processor: Any, hidden: Tensor, lm_head: Any, *args: Any,
                **kwargs: Any) -> Tensor:  # fmt: skip
    """Around the logits processor's product with the lm_head: use the packed weight."""
    packed = packed_of(lm_head)
    # SGLang's paths for other precisions and for LoRA read the weight itself.
    if packed is None or processor.use_fp32_lm_head or hasattr(lm_head, "set_lora"):
        return original(processor, hidden, lm_head, *args, **kwargs)
    return packed(hidden.to(packed.dtype))


def update_by_ipc(original: Any, updater: Any, request: Any) -> Any:
    """Around a weight update through IPC: restore packed weights first, which SGLang leaves out."""
    updater.begin_weight_update()
    try:
        return original(updater, request)
    finally:
        updater.end_weight_update(run_post_load=False)


@cache
def _with_weight(layer_class: Any) -> type:
    """Return a subclass of a layer's class whose `weight` is unpacked when it is first read. It
    then stays beside the packed weight, so it takes memory, and later reads are fast."""

    def weight(layer: Any) -> nn.Parameter:
        if "weight" not in layer._parameters:
            packed = packed_of(layer)
            if packed is None:
                raise AttributeError("weight")
            parameter = nn.Parameter(packed.unpacked(), requires_grad=False)
            vars(parameter).update(layer.__dict__["loading_attributes"])
            layer._parameters["weight"] = parameter
        return layer._parameters["weight"]

    members = {"weight": property(weight), "__module__": layer_class.__module__}
    return type(layer_class.__name__, (layer_class,), members)
