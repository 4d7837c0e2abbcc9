"""Rotary position embedding, computed from the frequencies.

There is no table of cos and sin, so no position is out of range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_rope import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Rotary frequencies, plain or scaled. Those of a scaling are Transformers'.

    Args:
        max_positions: the original context length if the scaling does not name one.

    Returns:
        Frequencies float32 `[head_dim / 2]`, and the factor on cos and sin.
    """
    if not rope.scaling:
        return rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    # Few drafts scale, and the import takes a second.
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={**rope.scaling, "rope_theta": rope.theta},
    )
    return ROPE_INIT_FUNCTIONS[rope.scaling["rope_type"]](config, None)


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
