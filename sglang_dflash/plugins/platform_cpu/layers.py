"""SGLang's small layers in as few torch calls as there are. On a CPU a call costs more than the
arithmetic of a decode step's few rows.

Every operation here gives a row the same bits, whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def register(key: str) -> None:
    """Make SGLang take these for its fused operations on the platform with that dispatch key."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    forwards = {SiluAndMul: silu_and_mul, RMSNorm: rms_norm, GemmaRMSNorm: gemma_rms_norm}
    # Subclasses compute other angles, and rotate by them as their base class does.
    rotaries = [RotaryEmbedding]
    for kind in rotaries:
        rotaries += kind.__subclasses__()
        if kind.forward_native is RotaryEmbedding.forward_native:
            forwards[kind] = rotate
    for kind, forward in forwards.items():
        BaseFusedOp.register_oot_forward(kind, forward, key)


def silu_and_mul(_self: Any, x: Tensor) -> Tensor:
    """silu(gate) * up `[..., I]` of both side by side, `[..., 2 I]`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of x `[..., E]` or, with a residual, of their sum, and the sum.

    In 16 bits the sum is rounded before it is normalized, as other engines do; SGLang rounds
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
    """As `rms_norm`; the weight is stored as its difference from 1."""
    weight = self.gemma_weight
    if weight.dtype != x.dtype:
        return self.forward_native(x, residual, post_residual_addition)
    return _norm(x, residual, post_residual_addition, weight, self.variance_epsilon)


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
    whole = self.rotary_dim == self.head_size and self.is_neox_style
    if not whole or offsets is not None or query.dim() != 2 or positions.dim() != 1:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    rotation = _rotation(self, positions, query.dtype)
    return _rotated(query, rotation, self.head_size), _rotated(key, rotation, self.head_size)


def _rotation(self: Any, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """cos, cos and -sin, sin of every position, `[2, N, 1, 2, D / 2]`. All layers of a forward have
    the same positions, and most share this object."""
    known = self.__dict__.get("plain_cpu_rotation")
    if known is None or known[1].dtype != dtype or not torch.equal(known[0], positions):
        cos, sin = self.cos_sin_cache[positions].to(dtype).chunk(2, dim=-1)
        both = torch.stack((torch.stack((cos, cos), 1), torch.stack((-sin, sin), 1)))
        known = positions.clone(), both[:, :, None]
        # Not through __setattr__: a module would register a buffer.
        self.__dict__["plain_cpu_rotation"] = known
    return known[1]


def _rotated(x: Tensor, rotation: Tensor, head_size: int) -> Tensor:
    halves = x.view(len(x), -1, 2, head_size // 2)
    # Without a fused multiply-add, whose use depends on where a row lies.
    return (halves * rotation[0]).add_(halves.flip(2).mul_(rotation[1])).view(x.shape)
