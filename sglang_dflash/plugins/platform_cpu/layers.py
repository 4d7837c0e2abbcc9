"""SGLang's small layers in as few torch calls as possible: on a CPU, a call costs more than the
arithmetic of a decode step's few rows.

Every operation here gives a row the same bits, whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def register(key: str) -> None:
    """Register these functions as SGLang's fused operations for the dispatch key of a platform."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import Gemma4RMSNorm, GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    forwards = {
        SiluAndMul: silu_and_mul,
        RMSNorm: rms_norm,
        GemmaRMSNorm: gemma_rms_norm,
        Gemma4RMSNorm: gemma4_rms_norm,
    }
    # Subclasses compute other angles, and rotate in the same way as their base class.
    rotaries = [RotaryEmbedding]
    for layer_class in rotaries:
        rotaries += layer_class.__subclasses__()
        if layer_class.forward_native is RotaryEmbedding.forward_native:
            forwards[layer_class] = rotate
    for layer_class, forward in forwards.items():
        BaseFusedOp.register_oot_forward(layer_class, forward, key)


def silu_and_mul(_self: Any, x: Tensor) -> Tensor:
    """Return silu(gate) * up, `[..., I]`, for `x` `[..., 2 I]` that holds gate and up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the RMSNorm of x `[..., E]`; with a residual, that of their sum, and the sum.

    In 16 bits the sum is rounded before it is normalized, as in other engines; SGLang rounds it
    afterwards.
    """
    weight = self.weight
    rare = (
        self.variance_size_override is not None
        or self.fp32_residual
        or self.override_orig_dtype is not None
        or weight.dtype != x.dtype
        or (self.cast_x_before_out_mul and x.dtype != torch.float32)
    )
    if rare:
        return self.forward_native(x, residual, post_residual_addition)
    return _norm(x, residual, post_residual_addition, weight, self.variance_epsilon)


def gemma_rms_norm(
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the same as `rms_norm`, for a weight that is stored as its difference from 1."""
    weight = self.gemma_weight
    if weight.dtype != x.dtype:
        return self.forward_native(x, residual, post_residual_addition)
    return _norm(x, residual, post_residual_addition, weight, self.variance_epsilon)


def gemma4_rms_norm(self: Any, x: Tensor) -> Tensor:
    """Return the RMSNorm of x `[..., E]`, computed in float32.

    The weights of a norm without a scale are one, except in a router of experts, where they hold
    the router's scale. SGLang's kernel multiplies by them; its torch code does not.
    """
    weight = self.weight.float() + (self.scale_shift if self.with_scale else 0)
    return F.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)


def _norm(
    x: Tensor, residual: Tensor | None, addition: Tensor | None, weight: Tensor, eps: float
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    total = x + residual
    if addition is not None:
        total += addition
    return F.rms_norm(total, weight.shape, weight, eps), total


def rotate(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """RoPE of query `[N, H * D]` and key `[N, G * D]` at int64 positions `[N]`."""
    is_plain = self.rotary_dim == self.head_size and self.is_neox_style
    if not is_plain or offsets is not None or query.dim() != 2 or positions.dim() != 1:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    rotation = _rotation(self, positions, query.dtype)
    return _rotate(query, rotation, self.head_size), _rotate(key, rotation, self.head_size)


def _rotation(self: Any, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (cos, cos) and (-sin, sin) of every position, `[2, N, 1, 2, D / 2]`.

    The result is cached: all layers of a forward have the same positions, and most share `self`.
    """
    cached = self.__dict__.get("plain_cpu_rotation")
    if cached is None or cached[1].dtype != dtype or not torch.equal(cached[0], positions):
        cos, sin = self.cos_sin_cache[positions].to(dtype).chunk(2, dim=-1)
        cos_and_sin = torch.stack((torch.stack((cos, cos), 1), torch.stack((-sin, sin), 1)))
        cached = positions.clone(), cos_and_sin[:, :, None]
        # A module's __setattr__ would register a buffer.
        self.__dict__["plain_cpu_rotation"] = cached
    return cached[1]


def _rotate(x: Tensor, rotation: Tensor, head_size: int) -> Tensor:
    halves = x.view(len(x), -1, 2, head_size // 2)
    # No fused multiply-add: whether torch uses one depends on the place of a row.
    return (halves * rotation[0]).add_(halves.flip(2).mul_(rotation[1])).view(x.shape)
