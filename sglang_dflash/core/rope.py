"""Rotary position embedding, computed from the frequencies: there is no table that a long context could run past."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.checkpoint.rope_config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Frequencies float32 `[head_dim / 2]` and the factor on cos and sin, for plain, linear, llama3 and YaRN scaling.

    The scaling's `factor` decides, whatever `max_positions` over the original context would imply.
    """
    plain = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = rope.scaling
    kind = scaling.get("rope_type")
    if kind is None:
        return plain, 1.0
    factor, original = (
        float(scaling["factor"]),
        float(scaling.get("original_max_position_embeddings", max_positions)),
    )
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(plain, factor, original, scaling), 1.0
    return _yarn(plain, factor, original, rope.theta, scaling), _yarn_attention(factor, scaling)


def _llama3(plain: Tensor, factor: float, original: float, scaling: Mapping[str, Any]) -> Tensor:
    """Slow the low frequencies by `factor`, keep the high ones, blend between (Llama 3.1 release code)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(
    plain: Tensor, factor: float, original: float, theta: float, scaling: Mapping[str, Any]
) -> Tensor:
    """YaRN (arXiv 2309.00071): interpolate the dimensions that turn seldom over the original context, keep the fast ones.

    The ramp between the two begins and ends at whole dimensions, unless `truncate` is false.
    """
    head_dim = 2 * len(plain)

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        dimension_of(float(scaling.get("beta_fast", 32))),
        dimension_of(float(scaling.get("beta_slow", 1))),
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low or 0.001)).clamp(
        0, 1
    )
    return plain / factor * ramp + plain * (1 - ramp)


def _yarn_attention(factor: float, scaling: Mapping[str, Any]) -> float:
    """Factor on cos and sin: `attention_factor`, or 0.1 ln s + 1, or with both mscales the ratio of 0.1 mscale ln s + 1 for each."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    own, over_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    own, over_all = (float(own), float(over_all)) if own and over_all else (1.0, 0.0)
    growth = 0.1 * math.log(max(factor, 1.0))
    return (own * growth + 1) / (over_all * growth + 1)


class Rotary(torch.nn.Module):
    """Turns positions into cos and sin, and rotates heads by them (first half against second half, as Qwen and Llama)."""

    frequencies: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        frequencies, self.attention_factor = inverse_frequencies(rope, head_dim, max_positions)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions int `[..., n]` to cos and sin `[..., n, 1, head_dim]`, computed in float32."""
        angles = (positions.float()[..., None] * self.frequencies.float()).repeat(
            *(1,) * positions.ndim, 2
        )[..., None, :]
        return (angles.cos() * self.attention_factor).to(dtype), (
            angles.sin() * self.attention_factor
        ).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[..., n, heads, head_dim]` by cos and sin `[..., n, 1, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
