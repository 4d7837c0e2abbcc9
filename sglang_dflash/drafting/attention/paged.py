"""Draft attention by a kernel that reads K/V through a page table of page size 1 and cannot mask.

Such a kernel numbers a request's keys in the order of the table. Therefore dead entries are left
out, and the block's own K/V is written to scratch entries of the cache, which follow the context in
the table. If an entry is dead, those before it seem nearer than they are: a sliding layer then sees
some tokens past its window. That changes drafts, never outputs.

Letters in shapes: R requests, B block positions, C table columns, S entries, H query heads, G kv
heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.drafting.attention.table import ContextTable


class Pages(NamedTuple):
    """The keys of R requests, in order.

    Attributes:
        table: int32 `[R, C + B]`, entries; those past a request's keys are valid numbers.
        lengths: int32 `[R]`, keys per request; the last B are the block's.
        queries: int32 `[R + 1]`, where each request's rows of q begin.
    """

    table: Tensor
    lengths: Tensor
    queries: Tensor


class PagedKernel(Protocol):
    """softmax(q k^T / sqrt(D)) v, the last query aligned with the last key."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Pages, block: int, layer: LayerAttention
    ) -> Tensor:
        """
        Args:
            q: `[R * B, H, D]`.
            k, v: `[S, 1, G, D]`, with any stride between entries.
            pages: the keys of each request.
            block: B.
            layer: how the layer attends.

        Returns:
            `[R * B, H, D]`.
        """


class PagedAttention:
    """`DraftAttention` through a page table. Needs R * B scratch entries in the cache."""

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        draft_block: int,
        scratch: int,
        kernel: PagedKernel,
        holes: bool = True,
    ) -> None:
        """`scratch`: the first scratch entry; `holes`: see `AttentionSizes`."""
        self._layers, self._block, self._holes = tuple(layers), draft_block, holes
        self._scratch, self._kernel = scratch, kernel
        none = torch.empty(0, dtype=torch.int32)
        self._kv, self._pages = none, Pages(none, none, none)

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Make the page table; no K/V is copied."""
        self._kv, self._pages = kv, pages(table.entries, self._block, self._scratch, self._holes)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = self._kv[self._scratch : self._scratch + k.shape[0] * k.shape[1], layer]
        block[:, 0], block[:, 1] = k.flatten(0, 1), v.flatten(0, 1)
        old = self._kv[:, layer, :, None]  # [S, 2, 1, G, D]
        rows, attention = q.flatten(0, 1), self._layers[layer]
        out = self._kernel(rows, old[:, 0], old[:, 1], self._pages, self._block, attention)
        return out.view(q.shape)


def pages(entries: Tensor, block: int, scratch: int, holes: bool) -> Pages:
    """The live `entries` int32 `[R, C]` of each request, then its `block` scratch entries, which
    begin at `scratch`. Without `holes` the live ones are in front already, and are not sorted.
    Reads nothing on the host."""
    requests, device = len(entries), entries.device
    live = entries >= 0
    counts = live.sum(1, keepdim=True)
    if holes:
        order = (~live).to(torch.uint8).argsort(dim=1, stable=True)
        entries = entries.gather(1, order)
    steps = torch.arange(block, device=device)
    of_block = scratch + block * torch.arange(requests, device=device)[:, None] + steps
    table = torch.cat((entries, of_block.int()), dim=1)
    table.scatter_(1, counts + steps, of_block.int())
    queries = block * torch.arange(requests + 1, dtype=torch.int32, device=device)
    return Pages(table.clamp_(min=0), (counts[:, 0] + block).int(), queries)
