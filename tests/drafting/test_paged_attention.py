"""Draft attention through a page table, with a plain kernel, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.drafting.attention.paged import PagedAttention, Pages, pages
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable

LAYERS = (
    LayerAttention(None, False),
    LayerAttention(None, True),
    LayerAttention(9, True),
    LayerAttention(9, False),
)
BLOCK, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
ENTRIES, PADDING = 60, 1
SCRATCH = ENTRIES + PADDING


def plain_kernel(
    q: Tensor, k: Tensor, v: Tensor, known: Pages, block: int, layer: LayerAttention
) -> Tensor:
    """Compute FlashAttention's output key by key: the last query is aligned with the last key."""
    out, groups = torch.empty_like(q), q.shape[1] // k.shape[2]
    for r, length in enumerate(known.lengths.tolist()):
        entries = known.table[r, :length].long()
        for row in range(int(known.queries[r]), int(known.queries[r + 1])):
            at = length - block + row - int(known.queries[r])
            seen = [
                j
                for j in range(length)
                if not (layer.causal and j > at)
                and not (layer.sliding_window and at - j >= layer.sliding_window)
            ]
            keys, values = k[entries[seen], 0], v[entries[seen], 0]
            for head in range(q.shape[1]):
                group = head // groups
                weights = (keys[:, group] @ q[row, head] / math.sqrt(q.shape[2])).softmax(0)
                out[row, head] = weights @ values[:, group]
    return out


def compare(
    entries: list[list[int]],
    lengths: list[int],
    layers: tuple[LayerAttention, ...],
    holes: bool = True,
) -> None:
    requests = len(lengths)
    kv = torch.randn(SCRATCH + requests * BLOCK, len(layers), 2, KV_HEADS, HEAD_DIM)
    table = ContextTable(
        torch.tensor(entries, dtype=torch.int32).view(requests, len(entries[0]) if entries else 2),
        torch.tensor(lengths),
    )
    ours = PagedAttention(layers, BLOCK, SCRATCH, plain_kernel, holes)
    reference = TorchAttention(layers, BLOCK)
    ours.prepare(kv, table)
    reference.prepare(kv, table)
    before = kv[:SCRATCH].clone()
    for layer in range(len(layers)):
        q = torch.randn(requests, BLOCK, HEADS, HEAD_DIM)
        k, v = torch.randn(2, requests, BLOCK, KV_HEADS, HEAD_DIM)
        expected = reference.attend(layer, q, k, v)
        torch.testing.assert_close(ours.attend(layer, q, k, v), expected, atol=1e-6, rtol=1e-5)
    assert kv[:SCRATCH].equal(before)


@pytest.mark.parametrize("holes", [True, False])
def test_it_is_the_reference(holes: bool) -> None:
    """Ragged requests, nothing dead; one without context."""
    columns = 14
    entries = [[*torch.randperm(ENTRIES)[:n].tolist(), *[-1] * (columns - n)] for n in (14, 0, 5)]
    compare(entries, [14, 0, 5], LAYERS, holes)


def test_a_table_without_holes_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of it may have 262,144 columns."""
    entries = torch.tensor([[5, 7, -1], [-1, -1, -1]], dtype=torch.int32)
    expected = pages(entries, 2, 50, holes=True)
    monkeypatch.setattr(Tensor, "argsort", None)
    got = pages(entries, 2, 50, holes=False)
    assert torch.equal(got.lengths, expected.lengths)
    for row, length in enumerate(got.lengths.tolist()):
        assert torch.equal(got.table[row, :length], expected.table[row, :length])
    with pytest.raises(TypeError):
        pages(entries, 2, 50, holes=True)


def test_pages() -> None:
    known = pages(torch.tensor([[-1, 7, -1, 3], [-1, -1, -1, -1]], dtype=torch.int32), 2, 50, True)
    assert known.lengths.tolist() == [4, 2] and known.queries.tolist() == [0, 2, 4]
    assert known.table[0, :4].tolist() == [7, 3, 50, 51]
    assert known.table[1, :2].tolist() == [52, 53]
    assert int(known.table.min()) >= 0 and known.table.dtype == known.lengths.dtype == torch.int32


@pytest.mark.parametrize(
    ("entries", "lengths", "layers"),
    [
        ([[4, -1, -1, 9, 2, -1], [-1, -1, 8, -1, -1, -1]], [6, 3], LAYERS[:2]),
        ([[], []], [0, 0], LAYERS),
        ([], [], LAYERS),
        ([[1, 2]], [2], LAYERS),
    ],
    ids=["dead entries", "no context", "no requests", "one request"],
)
def test_odd_batches(
    entries: list[list[int]], lengths: list[int], layers: tuple[LayerAttention, ...]
) -> None:
    compare(entries, lengths, layers)
