"""The interface of draft attention, and how a backend is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.drafting.attention.capabilities import AttentionLoad, Capabilities
from sglang_dflash.drafting.attention.table import ContextTable


class DraftAttention(Protocol):
    """Attention of the drafted blocks of R requests: `prepare` once per step, then `attend` for
    every layer of that step. For the draft layers that share a draft KV cache.

    Letters in shapes: R requests, B block positions, C context columns, H query heads, G kv heads,
    D head dim.
    """

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Take what all layers of a step share.

        Args:
            kv: the draft KV cache's entries `[S, L, 2, G, D]`; the last one is the spare entry
                (`DraftKVCache`).
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
class AttentionSizes:
    """The sizes and options that an attention backend is made for.

    Attributes:
        load: its largest step.
        device: of the cache.
        layers: the layers that it serves, and how each attends.
        scratch: the cache's first scratch entry, if the backend needs them.
        holes: whether the K/V of a visible token may be missing: the cache has tags.
    """

    load: AttentionLoad
    device: torch.device
    layers: tuple[LayerAttention, ...]
    scratch: int = 0
    holes: bool = True


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Backend:
    """The capabilities of a backend, and how to make one."""

    capabilities: Capabilities
    make: Callable[[AttentionSizes], DraftAttention]
