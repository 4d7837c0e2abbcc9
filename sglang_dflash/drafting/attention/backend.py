"""The interface of draft attention, torch's row, and the choice among backends by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.reference import (
    CHUNK_BYTES,
    TorchAttention,
    bytes_of_a_column,
)
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.facts.draft_config import DraftConfig, LayerAttention
from sglang_dflash.facts.errors import ConfigError


class DraftAttention(Protocol):
    """Attention of the drafted blocks of R requests: `prepare` once per step, then `attend` for
    every layer of that step. For the draft layers that share a draft KV cache.

    Letters in shapes: R requests, B block positions, C context columns, H query heads, G kv heads,
    D head dim.
    """

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Take what all layers of a step share.

        Args:
            kv: the draft KV cache's entries `[S, L, 2, G, D]`; the last one is spare.
            table: which of them each request reads. Takes effect in `attend`, which reads the
                cache.
        """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(D)) v over the visible context and the block.

        Args:
            layer: of those that it is for, from 0.
            q: `[R, B, H, D]`, after norm and RoPE.
            k: `[R, B, G, D]`, the block's own keys, after norm and RoPE.
            v: `[R, B, G, D]`.

        Returns:
            `[R, B, H, D]` in q's dtype.
        """


@dataclass(frozen=True)
class Capabilities:
    """What a backend can serve, as data. None: no limit.

    Attributes:
        devices: torch device types.
        head_dims: head dims.
        capturable: whether `prepare` and `attend` can be captured in a CUDA graph.
        scratch: whether it needs an entry of the cache for every block position.
        kv_dtypes: of the draft KV cache.
    """

    devices: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    capturable: bool = False
    scratch: bool = False
    kv_dtypes: frozenset[torch.dtype] | None = None

    def obstacle(
        self, config: DraftConfig, device: torch.device, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """The first reason why this draft cannot be served on that device, or None.

        Args:
            kv_dtype: of the draft KV cache; None if it is not known.
        """
        if self.devices is not None and device.type not in self.devices:
            return f"runs on {', '.join(sorted(self.devices))}, not on {device.type}"
        if self.head_dims is not None and config.head_dim not in self.head_dims:
            served = ", ".join(map(str, sorted(self.head_dims)))
            return f"serves head dim {served}, the draft's is {config.head_dim}"
        if kv_dtype is not None and self.kv_dtypes is not None and kv_dtype not in self.kv_dtypes:
            served = ", ".join(sorted(_name(dtype) for dtype in self.kv_dtypes))
            return f"serves draft K/V in {served}, not in {_name(kv_dtype)}"
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Setting:
    """What a backend is made for, beside the draft.

    Attributes:
        draft_block: B.
        device: where the cache is.
        layers: that it is for, and how they attend.
        tp: the rank, which holds a part of the heads.
        requests: most requests of a batch.
        columns: columns of the widest table.
        scratch: the cache's first scratch entry, if the backend needs them.
        holes: whether K/V of a token in sight may be dead, as in a bounded cache.
    """

    draft_block: int
    device: torch.device
    layers: tuple[LayerAttention, ...]
    tp: TensorParallel = field(default_factory=TensorParallel)
    requests: int = 1
    columns: int = 1
    scratch: int = 0
    holes: bool = True


@dataclass(frozen=True)
class Backend:
    """A row of the table: what it can serve, how to make one for a draft, and the bytes that it
    then takes beside the cache, at most."""

    capabilities: Capabilities
    make: Callable[[DraftConfig, Setting], DraftAttention]
    workspace: Callable[[DraftConfig, Setting], int] = lambda _config, _setting: 0


def _torch_workspace(config: DraftConfig, of: Setting) -> int:
    """A chunk, or what the widest table of the largest batch takes."""
    heads = of.tp.shard_size("num_attention_heads", config.num_attention_heads)
    kv_heads = of.tp.kv_heads(config.num_key_value_heads)
    each = bytes_of_a_column(kv_heads, config.head_dim, of.draft_block * heads)
    return min(CHUNK_BYTES, of.requests * (of.columns + of.draft_block) * each)


# The one that needs no kernels. All are in `ATTENTION` of `serving/gpu/backends.py`.
TORCH = Backend(
    Capabilities(),
    lambda _config, of: TorchAttention(of.layers, of.draft_block),
    _torch_workspace,
)


def choose_attention(
    name: str | None,
    config: DraftConfig,
    device: torch.device,
    backends: Mapping[str, Backend],
    kv_dtype: torch.dtype | None = None,
) -> str:
    """The name of the backend for a draft.

    Args:
        name: the one asked for; None for the first of `backends` that can serve this draft.
        kv_dtype: of the draft KV cache; None if it is not known.

    Raises:
        ConfigError: the name is unknown, or the backend cannot serve this draft on this device; the
            message lists those that can.
    """
    obstacles = {
        key: row.capabilities.obstacle(config, device, kv_dtype) for key, row in backends.items()
    }
    able = [key for key, obstacle in obstacles.items() if obstacle is None]
    if name is None:
        return able[0]
    obstacle = obstacles.get(name, "unknown")
    if obstacle is not None:
        raise ConfigError("attention", name, f"{obstacle}; choose one of {able}")
    return name
