"""The reference backend: torch operations on a copy of the visible K/V. Runs on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.core.attention.table import ContextTable
from sglang_dflash.core.attention.visibility import visibility


class TorchAttention:
    """`DraftAttention` by scaled_dot_product_attention with a mask per kind of layer."""

    def __init__(self, layers: Sequence[LayerAttention], block_size: int) -> None:
        self._layers, self._block = tuple(layers), block_size
        self._kv = torch.empty(0)  # [R, C + B, L, 2, G, D]
        self._masks: dict[LayerAttention, Tensor] = {}

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Copy the visible entries, and leave B free columns for the block's own K/V."""
        padding = table.entries.new_full((1, 1), len(kv) - 1)
        free = padding.expand(len(table.entries), self._block)
        entries = torch.cat((table.entries, free), dim=1)
        self._kv = kv.index_select(0, entries.flatten()).unflatten(0, entries.shape)
        self._masks = {
            kind: visibility(kind, table.positions, table.seq_lens, table.live, self._block)
            for kind in set(self._layers)
        }

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._kv[:, -self._block :, layer, 0] = k
        self._kv[:, -self._block :, layer, 1] = v
        kv = self._kv[:, :, layer].to(q.dtype)
        return torch_block_attention(q, kv[:, :, 0], kv[:, :, 1], self._masks[self._layers[layer]])


def torch_block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v.

    Args:
        q: `[R, B, H, D]`.
        k, v: `[R, C + B, G, D]`.
        mask: bool `[R, 1 or B, C + B]`.

    Returns:
        `[R, B, H, D]`.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    groups, block = heads // kv_heads, q.shape[1]
    # Query heads that share a kv head become its rows, so that no K is repeated: [R, G, g * B, D].
    rows = q.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask.shape[1] > 1:
        mask = mask.repeat(1, groups, 1)
    mask = mask[:, None].expand(-1, -1, rows.shape[2], -1)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), mask)
    return out.unflatten(2, (groups, block)).permute(0, 3, 1, 2, 4).flatten(2, 3)
