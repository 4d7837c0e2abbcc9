"""Rotary position embedding, computed from the frequencies: there is no table that a long context could run past."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Frequencies float32 `[head_dim / 2]` and the factor on cos and sin, for plain, linear, llama3 and YaRN scaling."""
    plain = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = rope.scaling.get("rope_type")
    if kind is None:
        return plain, 1.0
    factor = float(rope.scaling["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(plain, factor, rope.scaling), 1.0
    return _yarn(plain, factor, rope, head_dim, max_positions)


def _llama3(plain: Tensor, factor: float, scaling: Mapping[str, Any]) -> Tensor:
    """Slow the low frequencies by `factor`, keep the high ones, blend between (Llama 3.1 release code)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(plain: Tensor, factor: float, rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate the slow dimensions, keep the fast ones, scale attention by 0.1 ln s + 1."""
    scaling = rope.scaling
    original = float(scaling.get("original_max_position_embeddings") or max_positions)

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(float(scaling.get("beta_fast") or 32))), 0)
    high = min(math.ceil(dimension_of(float(scaling.get("beta_slow") or 1))), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    attention = scaling.get("attention_factor")
    return frequencies, float(attention) if attention is not None else 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rotary(torch.nn.Module):
    """Turns positions into cos and sin, and rotates heads by them (first half against second half, as Qwen and Llama)."""

    frequencies: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        frequencies, self.attention_factor = inverse_frequencies(rope, head_dim, max_positions)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions int `[..., n]` to cos and sin `[..., n, 1, head_dim]`, computed in float32."""
        angles = (positions.float()[..., None] * self.frequencies.float()).repeat(*(1,) * positions.ndim, 2)[..., None, :]
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[..., n, heads, head_dim]` by cos and sin `[..., n, 1, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
