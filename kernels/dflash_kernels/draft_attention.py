"""The draft attention backend `triton`: `block_attention` behind the interface of
`sglang_dflash.core.attention.backend`. Letters in shapes as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.block_attention import (
    HEAD_DIMS,
    Workspace,
    block_attention,
    choose_splits,
)
from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention
from sglang_dflash.core.attention.backend import BACKENDS, Backend, Capabilities
from sglang_dflash.core.attention.table import ContextTable
from sglang_dflash.core.options import ContextWindow
from sglang_dflash.core.parallel import TensorParallel

CAPABILITIES = Capabilities(
    devices=frozenset({"cuda"}), head_dims=HEAD_DIMS, sliding_layers=True, capturable=True
)


@dataclass(frozen=True)
class Limits:
    """What the workspace is sized for.

    Attributes:
        requests: most requests of a batch.
        columns: C of the widest table.
        processors: multiprocessors of the GPU.
    """

    requests: int
    columns: int
    processors: int


class TritonAttention:
    """`DraftAttention` that reads the cache in place, with a workspace of fixed size."""

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        window: ContextWindow | None,
        limits: Limits,
        kv_heads: int,
        rows: int,
        head_dim: int,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            layers: of the draft.
            window: what the drafts read; the tables' columns are those of `context_positions`.
            kv_heads: G on this rank.
            rows: block positions times query heads per kv head.
            head_dim: D.
        """
        self._layers, self._window, self._limits = tuple(layers), window, limits
        self._shape = (rows, head_dim)
        splits = {r: self._splits(r, kv_heads, limits.columns) for r in _each(limits.requests)}
        programs = max((r * kv_heads * p for r, p in splits.items() if p > 1), default=0)
        self._partial = torch.empty(programs, rows, head_dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(programs, rows, dtype=torch.float32, device=device)
        self._kv = self._entries = self._seq_lens = torch.empty(0, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace."""
        return self._partial.nbytes + self._lse.nbytes

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Take the table; no K/V is copied."""
        self._kv, self._seq_lens = kv, table.seq_lens
        self._entries = torch.where(table.live, table.entries, -1).int()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = self._splits(len(q), k.shape[2], self._entries.shape[1])
        space = self._workspace(len(q), k.shape[2], splits)
        block_attention(
            out, q, k, v, self._kv[:, layer], self._entries, self._seq_lens,
            self._layers[layer], self._window, space,
        )  # fmt: skip
        return out

    def _splits(self, requests: int, kv_heads: int, columns: int) -> int:
        return choose_splits(max(requests, 1), kv_heads, columns, self._limits.processors)

    def _workspace(self, requests: int, kv_heads: int, splits: int) -> Workspace | None:
        if splits == 1:
            return None
        shape, programs = (requests, kv_heads, splits), requests * kv_heads * splits
        return Workspace(
            self._partial[:programs].view(*shape, *self._shape),
            self._lse[:programs].view(*shape, self._shape[0]),
        )


def _each(requests: int) -> range:
    return range(1, requests + 1)


def backends(
    window: ContextWindow | None, limits: Limits, tp: TensorParallel, device: torch.device | str
) -> Mapping[str, Backend]:
    """The table of `core.attention.backend`, and `triton` for this window, rank and device."""

    def make(config: DraftConfig, block: int) -> TritonAttention:
        heads = tp.shard_size("num_attention_heads", config.num_attention_heads)
        kv_heads = tp.shard_size_or_replica("num_key_value_heads", config.num_key_value_heads)
        rows = block * (heads // kv_heads)
        return TritonAttention(
            config.layers, window, limits, kv_heads, rows, config.head_dim, device
        )

    return {**BACKENDS, "triton": Backend(CAPABILITIES, make)}
