"""Rotary position embedding, computed from the frequencies.

There is no table of cos and sin, so no position is out of range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.facts.rope_config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Rotary frequencies for plain, linear, llama3 and YaRN scaling.

    The scaling's `factor` is used as given, even if `max_positions` over the original context is
    another ratio.

    Args:
        max_positions: the original context length if the scaling does not name one.

    Returns:
        Frequencies float32 `[head_dim / 2]`, and the factor on cos and sin.
    """
    plain = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = rope.scaling
    kind = scaling.get("rope_type")
    if kind is None:
        return plain, 1.0
    factor = float(scaling["factor"])
    original = float(scaling.get("original_max_position_embeddings", max_positions))
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(plain, factor, original, scaling), 1.0
    return _yarn(plain, factor, original, rope.theta, scaling), _yarn_attention(factor, scaling)


def _llama3(plain: Tensor, factor: float, original: float, scaling: Mapping[str, Any]) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, blend between (Llama 3.1 release)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(
    plain: Tensor, factor: float, original: float, theta: float, scaling: Mapping[str, Any]
) -> Tensor:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones.

    Slow and fast are counted in turns over the original context. The ramp between them begins and
    ends at whole dimensions, unless `truncate` is false.
    """
    head_dim = 2 * len(plain)

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(float(scaling.get("beta_fast", 32)))
    high = dimension_of(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    dimensions = torch.arange(len(plain), dtype=torch.float32)
    ramp = ((dimensions - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def _yarn_attention(factor: float, scaling: Mapping[str, Any]) -> float:
    """YaRN's factor on cos and sin, with s = `factor`.

    `attention_factor` if given, else 0.1 ln s + 1. If both mscales are given, the ratio of
    0.1 mscale ln s + 1 to 0.1 mscale_all_dim ln s + 1.
    """
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    mscale, all_dim = (float(mscale), float(all_dim)) if mscale and all_dim else (1.0, 0.0)
    growth = 0.1 * math.log(max(factor, 1.0))
    return (mscale * growth + 1) / (all_dim * growth + 1)


class Rotary(torch.nn.Module):
    """Cos and sin of positions, for `rotate`. The frequencies are a float32 buffer `[D / 2]`."""

    frequencies: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        frequencies, self.attention_factor = inverse_frequencies(rope, head_dim, max_positions)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin `[..., N, 1, D]` of int positions `[..., N]`, from float32 to `dtype`."""
        half = positions.float()[..., None] * self.frequencies.float()
        angles = torch.cat((half, half), dim=-1)[..., None, :]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[..., N, H, D]` by cos and sin `[..., N, 1, D]`.

    Dimension i is paired with i + D / 2, as in Llama and Qwen.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
