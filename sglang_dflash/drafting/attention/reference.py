"""The reference backend: torch operations on a copy of one layer's visible K/V, in chunks of
bounded size. Runs on every device.

Letters in shapes: R requests, B block positions, C context columns, L layers, H query heads, G kv
heads, D head dim, M = B H / G query rows that share a kv head, c columns of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.drafting.attention.capabilities import CHUNK_BYTES, bytes_of_a_column
from sglang_dflash.drafting.attention.table import ContextTable, pieces
from sglang_dflash.drafting.attention.visibility import context_positions, visibility


class TorchAttention:
    """`DraftAttention` by scaled_dot_product_attention with a mask per kind of layer.

    As many requests are computed at once as the chunk holds. If it does not hold one, the request's
    context is cut, and the pieces are joined by a running softmax.
    """

    def __init__(
        self, layers: Sequence[LayerAttention], draft_block: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._layers, self._block, self._chunk_bytes = tuple(layers), draft_block, chunk_bytes
        self._kv = torch.empty(0)  # [S * L, 2, G, D]
        self._table = ContextTable(torch.empty(0, 0, dtype=torch.int32), torch.empty(0))
        self._depth = 0
        self._whole: _Whole | None = None

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Take the table. K/V is copied layer by layer."""
        self._kv, self._depth, self._table = kv.flatten(0, 1), kv.shape[1], table
        self._whole = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        requests, columns = self._table.entries.shape
        each = bytes_of_a_column(
            k.shape[2], k.shape[3], q.shape[1] * q.shape[2], self._kv.element_size()
        )
        at_once = self._chunk_bytes // (each * (columns + self._block))
        if at_once >= requests:
            # What all layers share is made once.
            self._whole = self._whole or self._requests(0, requests)
            return self._whole.attend(layer, self._layers[layer], q, k, v)
        out = torch.empty_like(q)
        for first, count in pieces(requests, at_once):
            chunk = slice(first, first + count)
            qkv = q[chunk], k[chunk], v[chunk]
            if at_once:
                part = self._requests(first, count)
                out[chunk] = part.attend(layer, self._layers[layer], *qkv)
            else:
                out[chunk] = self._one_request(layer, first, *qkv, self._chunk_bytes // each)
        return out

    def _requests(self, first: int, count: int) -> _Whole:
        entries, seq_lens = self._table
        chunk = slice(first, first + count)
        part = ContextTable(entries[chunk], seq_lens[chunk])
        return _Whole(part, self._block, self._depth, self._kv)

    def _one_request(
        self, layer: int, at: int, q: Tensor, k: Tensor, v: Tensor, width: int
    ) -> Tensor:
        """`[1, B, H, D]` for the request `at`, its context in pieces of `width` columns."""
        entries, seq_lens = (part[at : at + 1] for part in self._table)
        attention, none = self._layers[layer], entries[:, :0]
        softmax = RunningSoftmax(q[0], groups=q.shape[2] // k.shape[2])
        # The block first: each of its positions sees itself, so no maximum stays at -inf.
        softmax.add(k[0], v[0], visibility(attention, none, seq_lens, none >= 0, self._block)[0])
        for first, count in pieces(entries.shape[1], width):
            part = entries[0, first : first + count]
            positions = context_positions(seq_lens, count, attention.reach, first)
            visible = visibility(attention, positions, seq_lens, part[None] >= 0, self._block)
            old = self._kv[layer:].index_select(0, _rows(part, self._depth, len(self._kv)))
            softmax.add(old[:, 0], old[:, 1], visible[0, :, :count])
        return softmax.result().to(q.dtype)[None]


class _Whole:
    """Attention of some requests, each over its whole context."""

    def __init__(self, table: ContextTable, block: int, depth: int, kv: Tensor) -> None:
        """`kv`: `[S * L, 2, G, D]`."""
        self._table, self._block, self._kv = table, block, kv
        # B free columns for the block's own K/V.
        padded = F.pad(table.entries, (0, block), value=-1)
        self._rows = _rows(padded.flatten(), depth, len(kv))
        # Every layer's copy in turn.
        self._copy = kv.new_empty(len(self._rows), *kv.shape[1:])
        self._masks: dict[LayerAttention, Tensor] = {}

    def attend(
        self, layer: int, attention: LayerAttention, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        torch.index_select(self._kv[layer:], 0, self._rows, out=self._copy)
        columns = self._table.entries.shape[1] + self._block
        both = self._copy.unflatten(0, (len(q), columns)).to(q.dtype)  # [R, C + B, 2, G, D]
        both[:, -self._block :, 0] = k
        both[:, -self._block :, 1] = v
        if attention not in self._masks:
            self._masks[attention] = self._mask(attention)
        return torch_block_attention(q, both[:, :, 0], both[:, :, 1], self._masks[attention])

    def _mask(self, attention: LayerAttention) -> Tensor:
        entries, seq_lens = self._table
        positions = entries
        if attention.sliding_window is not None:  # others do not look at them
            positions = context_positions(seq_lens, entries.shape[1], attention.reach)
        return visibility(attention, positions, seq_lens, entries >= 0, self._block)


def _rows(entries: Tensor, depth: int, rows: int) -> Tensor:
    """Rows int64 of the first layer in K/V `[S * L, ...]`: of the spare entry for -1."""
    return (entries.long() * depth).remainder(rows)


class RunningSoftmax:
    """softmax(q k^T / sqrt(D)) v of one request, keys and values added piece by piece, in float32.

    Every query must see a key of the first piece.
    """

    def __init__(self, q: Tensor, groups: int) -> None:
        """`q`: `[B, H, D]`; `groups`: query heads per kv head."""
        self._block, self._groups = len(q), groups
        # [G, M, D]
        self._q = q.float().unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)
        self._q = self._q * q.shape[-1] ** -0.5
        self._max = self._q.new_full((*self._q.shape[:2], 1), float("-inf"))
        self._sum, self._out = torch.zeros_like(self._max), torch.zeros_like(self._q)

    def add(self, k: Tensor, v: Tensor, visible: Tensor) -> None:
        """Keys and values `[c, G, D]`; `visible`: bool `[1 or B, c]`."""
        rows = visible.repeat(self._groups, 1) if len(visible) > 1 else visible
        scores = self._q @ k.float().permute(1, 2, 0)
        scores.masked_fill_(~rows, float("-inf"))
        largest = torch.maximum(self._max, scores.amax(-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        shrink = (self._max - largest).exp_()
        self._sum = self._sum * shrink + weights.sum(-1, keepdim=True)
        self._out = self._out * shrink + weights @ v.float().transpose(0, 1)
        self._max = largest

    def result(self) -> Tensor:
        """`[B, H, D]`."""
        out = (self._out / self._sum).unflatten(1, (self._groups, self._block))
        return out.permute(2, 0, 1, 3).flatten(1, 2)


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
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), mask[:, None])
    return out.unflatten(2, (groups, block)).permute(0, 3, 1, 2, 4).flatten(2, 3)
