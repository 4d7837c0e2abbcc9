"""Norms, activations, rotary embedding and K/V writes of sgl_kernel and of SGLang's JIT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def normed(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm in float32; Gemma's weights have an offset of 1."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (weight.float() + offset)).to(x.dtype)


def norm_into(offset: float) -> Callable[..., None]:
    def run(out: Tensor, x: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
        out.copy_(normed(x, weight, eps, offset))

    return run


def add_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """residual += x, and x becomes its norm."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(normed(total, weight, eps, offset))


def add_norm_into(offset: float) -> Callable[..., None]:
    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
        add_norm_(x, residual, weight, eps, offset)

    return run


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    """out = activation(first half) * second half."""

    def run(out: Tensor, x: Tensor) -> None:
        a, b = x.float().chunk(2, -1)
        out.copy_(activation(a) * b)

    return run


def rotate_(x: Tensor, cos_sin: Tensor, positions: Tensor, neox: bool, dim: int) -> None:
    """Rotate the first `dim` of each head of x `[tokens, heads, head_dim]` in place."""
    cos, sin = cos_sin[positions.long()].float().unsqueeze(1).chunk(2, -1)
    y = x[..., :dim].float()
    a, b = y.chunk(2, -1) if neox else (y[..., ::2], y[..., 1::2])
    halves = (a * cos - b * sin, b * cos + a * sin)
    y = torch.cat(halves, -1) if neox else torch.stack(halves, -1).flatten(-2)
    x[..., :dim] = y.to(x.dtype)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor | None, head_size: int, cos_sin: Tensor, neox: bool
) -> None:
    for x in (q, k):
        if x is not None:
            rotate_(x.view(len(x), -1, head_size), cos_sin, positions, neox, cos_sin.shape[-1])


def store_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    limit: int = 0,
    skip: int = 0,
) -> None:
    """Write K/V of tokens into their slots; the slot `skip` is of padding."""
    slots = slots.long()
    written = (slots != skip).unsqueeze(-1)
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows = cache.view(len(cache), -1)
        new = x.reshape(len(x), -1).to(cache.dtype)
        rows[slots] = torch.where(written, new, rows[slots])


def rope_module(neox: str, dim: str, *_: Any) -> dict[str, Callable[..., None]]:
    is_neox, rotated = neox == "true", int(dim)

    def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        for x in (q, k):
            rotate_(x, cos_sin, positions, is_neox, rotated)

    def rope_and_store(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        rope(q, k, cos_sin, positions)
        store_(k, v, k_cache, v_cache, slots, skip=-1)

    return {"run_rope": rope, "run_rope_store": rope_and_store}


def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    q.copy_(normed(q, q_weight, eps))
    k.copy_(normed(k, k_weight, eps))


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(normed(x, weight, eps))


def activate(x: Tensor, out: Tensor, name: str) -> None:
    gated(ACTIVATIONS[name])(out, x)


def activate_rounding(x: Tensor, out: Tensor, name: str, limit: float = 0.0) -> None:
    """The activation is rounded before it is multiplied."""
    a, b = x.chunk(2, -1)
    out.copy_(ACTIVATIONS[name](a.float()).to(x.dtype) * b)


def clamp_position(out: Tensor, lengths: Tensor) -> None:
    out.copy_((lengths - 1).clamp(min=0))


OPERATORS: dict[str, Callable[..., None]] = {
    "rmsnorm": norm_into(0.0),
    "gemma_rmsnorm": norm_into(1.0),
    "fused_add_rmsnorm": add_norm_into(0.0),
    "gemma_fused_add_rmsnorm": add_norm_into(1.0),
    "rotary_embedding": rotary_embedding,
    **{f"{name}_and_mul": gated(activation) for name, activation in ACTIVATIONS.items()},
}
# A module of the JIT by its name: its arguments -> its functions.
MODULES: dict[str, Callable[..., dict[str, Callable[..., None]]]] = {
    "fused_rope": rope_module,
    "rotary_embedding": lambda *_: {"rotary_embedding": rotary_embedding},
    "kvcache": lambda *_: {"store_cache": store_},
    "qknorm": lambda *_: {"qknorm": qk_norm},
    "rmsnorm": lambda *_: {"rmsnorm": rms_norm},
    "fused_add_rmsnorm": lambda *_: {"fused_add_rmsnorm": add_norm_},
    "activation": lambda *_: {"run_activation": activate},
    "rounded_activation": lambda *_: {"run_activation_with_rounding": activate_rounding},
    "clamp_position": lambda *_: {"clamp_position": clamp_position},
}
