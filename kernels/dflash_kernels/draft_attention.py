"""The draft attention backend `triton`: `block_attention` behind the interface of
`sglang_dflash.drafting.attention.backend`. Letters in shapes as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_kernels.block_attention import Workspace, block_attention
from sglang_dflash.drafting.attention.backend import AttentionSizes
from sglang_dflash.drafting.attention.capabilities import choose_splits, split_shape
from sglang_dflash.drafting.attention.table import ContextTable


class TritonAttention:
    """`DraftAttention` that reads the cache in place, with a workspace of fixed size."""

    def __init__(self, sizes: AttentionSizes) -> None:
        self._layers, self._processors = sizes.layers, sizes.load.processors
        programs, *self._shape = split_shape(sizes.load)
        device = sizes.device
        self._partial = torch.empty(programs, *self._shape, dtype=torch.float32, device=device)
        self._lse = torch.empty(programs, self._shape[0], dtype=torch.float32, device=device)
        none = torch.empty(0, 0, device=device)
        self._kv, self._table = none, ContextTable(none, none)

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Take the table; no K/V is copied."""
        self._kv, self._table = kv, table

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        entries, seq_lens = self._table
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = choose_splits(len(q), k.shape[2], entries.shape[1], self._processors)
        space, kv = self._workspace(len(q), k.shape[2], splits.most), self._kv[:, layer]
        block_attention(
            out, q, k, v, kv, entries, seq_lens, self._layers[layer], space, splits.each
        )
        return out

    def _workspace(self, requests: int, kv_heads: int, splits: int) -> Workspace | None:
        if splits == 1:
            return None
        shape, programs = (requests, kv_heads, splits), requests * kv_heads * splits
        return Workspace(
            self._partial[:programs].view(*shape, *self._shape),
            self._lse[:programs].view(*shape, self._shape[0]),
        )
