"""The part of a recurrent target that replay reads: a layer's weights, and SGLang's runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

WIDTH = 4


def gdn_layer(heads: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """One of SGLang's GDN layers with that many key heads and twice as many value heads, of zeros;
    all heads have that dim."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SimpleNamespace(
        conv_weights=zeros(4 * heads * dim, WIDTH), bias=None, activation="silu",
        A_log=zeros(2 * heads).float(), dt_bias=zeros(2 * heads), num_k_heads=heads,
        num_v_heads=2 * heads, head_k_dim=dim, head_v_dim=dim,
    )  # fmt: skip


def runner_of(
    recording: dict[str, Any], conv: Tensor, temporal: Tensor, windows: Tensor, slots: Tensor
) -> Any:
    """A runner whose pool holds recurrent states and a verify forward's recording and windows;
    `slots`: of the requests of the forward."""
    cache = SimpleNamespace(conv=[conv], temporal=temporal, intermediate_conv_window=[windows])
    pool = SimpleNamespace(recording=SimpleNamespace(**recording), mamba_cache=cache)
    linear = SimpleNamespace(
        forward_metadata=SimpleNamespace(mamba_cache_indices=slots),
        _translate_mamba_indices=lambda indices: indices,
    )
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_pool=pool),
        attn_backend=SimpleNamespace(linear_attn_backend=linear),
    )


def recorded_runner(
    layer: Any, depth: int, rows: int, block: int, dtype: torch.dtype = torch.float32
) -> Any:
    """A runner of `depth` such layers after the forward of as many requests as there are rows, of
    zeros."""
    device, channels = layer.conv_weights.device, len(layer.conv_weights)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    recording = {
        "layers": dict.fromkeys(range(depth), layer),
        "gates": zeros(2, depth, rows, block, layer.num_v_heads),
        "windows": zeros(depth, rows, channels, WIDTH - 1),
    }
    return runner_of(
        recording,
        zeros(depth, rows, channels, WIDTH - 1),
        zeros(depth, rows, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim).float(),
        zeros(depth, rows, block, channels, WIDTH - 1),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
