"""Block attention over a table against its torch twin, which copies the context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from dflash_kernels import block_attention
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import WHOLE_CONTEXT, LayerAttention, Reach
from sglang_dflash.drafting.attention.capabilities import Splits
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.drafting.attention.visibility import context_positions
from tests.kernels.support import DEVICE, GARBAGE, Canaries, counted_bytes, needs_interpreter

FULL, CAUSAL = LayerAttention(None, False), LayerAttention(None, True)
SLIDING, NARROW = LayerAttention(150, True), LayerAttention(2, False)
# q, k, v, the layer's cache, table, lengths
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
LAYERS = {"full": FULL, "causal": CAUSAL, "sliding": SLIDING, "narrow": NARROW}
# 1 column, none, a tile's edge, three splits of four tiles or more.
RAGGED = [1, 0, 64, 290]
# Of values around 1. float32: another order of sums. Others: weights and output are rounded too,
# in another place than torch's.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def inputs(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block: int = 3,
    columns: int = 300,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    reach: Reach = WHOLE_CONTEXT,
) -> Given:
    """q, k, v as views of one projection, layer 1 of a cache, its table, and lengths.

    Every third entry is dead and NaN; columns past a request's hold garbage.
    """
    count, size = len(lengths), max(columns, 300)
    qkv = torch.randn(count, block, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    cache = torch.randn(size, 2, 2, kv_heads, head_dim, device=DEVICE).to(cache_dtype or dtype)
    cache[::3] = float("nan")
    entries = torch.full((count, columns), GARBAGE, dtype=torch.int32, device=DEVICE)
    for row, length in enumerate(lengths):
        used = min(columns, reach.tokens_read(length))
        numbers = torch.randperm(size, device=DEVICE)[:used]
        entries[row, :used] = numbers.where(numbers % 3 > 0, -1).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    return q, k, v, cache[:, 1], entries, seq_lens


def workspace(q: Tensor, kv_heads: int, splits: int) -> block_attention.Workspace | None:
    """Make a workspace for one more request, with NaN where nothing was written."""
    if splits == 1:
        return None
    requests, block, heads, head_dim = q.shape
    shape = requests + 1, kv_heads, splits, block * heads // kv_heads
    made = block_attention.Workspace(
        torch.empty(*shape, head_dim, device=DEVICE), torch.empty(shape, device=DEVICE)
    )
    made.partial.fill_(float("nan"))
    made.lse.fill_(float("nan"))
    return made


def reference(given: Given, layer: LayerAttention) -> Tensor:
    """Attend by torch, on copies without the entries that must not be read."""
    q, k, v, old, entries, seq_lens = given
    positions = context_positions(seq_lens, entries.shape[1], layer.reach)
    live = (positions < seq_lens[:, None]) & (entries >= 0)
    cache = torch.nn.functional.pad(old.to(q.dtype).nan_to_num(0.0), (0,) * 7 + (1,))
    attention = TorchAttention([layer], q.shape[1])
    attention.prepare(cache[:, None], ContextTable(entries.where(live, -1), seq_lens))
    return attention.attend(0, q, k, v)


def check(
    given: Given, layer: LayerAttention, reach: Reach, splits: int, each: int | None = None
) -> block_attention.Workspace | None:
    q, k = given[:2]
    canaries = Canaries()
    got = canaries.around(torch.full_like(q, 9.0).contiguous())
    space = workspace(q, k.shape[2], splits)
    block_attention.block_attention(got, *given, replace(layer, reach=reach), space, each or splits)
    expected = reference(given, replace(layer, reach=reach))
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert canaries.are_alive()
    if space is not None:
        assert space.partial[len(q) :].isnan().all()
    return space


@pytest.mark.parametrize(
    ("reach", "splits"),
    [(Reach(), 1), (Reach(), 3), (Reach(24, 0), 1), (Reach(170, 3), 3)],
    ids=["whole-1", "whole-3", "window-1", "sinks-3"],
)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_kernel_is_its_twin(layer: LayerAttention, reach: Reach, splits: int) -> None:
    check(inputs(RAGGED, reach=reach), layer, reach, splits)


def test_no_program_reads_more_than_the_longest_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests beside a long one are not split."""
    monkeypatch.setattr(block_attention, "LONGEST", tl.constexpr(100))
    space = check(inputs([290, 9, 90], reach=Reach()), FULL, Reach(), splits=3, each=1)
    assert space is not None
    written = ~space.lse[:3].isnan().any(3)
    assert written.sum(2).tolist() == [[count] * written.shape[1] for count in (3, 1, 1)]


EDGES = [(LayerAttention(8, True), Reach()), (LayerAttention(8, True), Reach(4, 2))]


@pytest.mark.parametrize(("layer", "reach"), EDGES, ids=["whole", "sinks"])
@pytest.mark.parametrize("splits", [1, 2])
def test_the_edge_of_a_window(layer: LayerAttention, reach: Reach, splits: int) -> None:
    """With nothing dead, a column more or less in sight shows. A sink's distance counts the tokens
    between it and the window."""
    q, k, v, old, entries, seq_lens = inputs([6, 7, 8, 9, 20], heads=1, kv_heads=1, reach=reach)
    entries[:, :20] = (3 * torch.arange(20, device=DEVICE) + 1).int()
    check((q, k, v, old, entries, seq_lens), layer, reach, splits)


# heads, kv heads, head dim, block
SHAPES = {
    "odd-block": (3, 1, 16, 7),
    "no-groups": (2, 2, 32, 2),
    "gpt-oss": (8, 1, 64, 8),
    "qwen3-b16": (4, 1, 128, 16),
    "b10": (4, 1, 128, 10),
    "wide-heads": (2, 1, 256, 5),
    "two-row-tiles": (12, 1, 16, 5),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_published_and_odd_shapes(shape: tuple[int, ...]) -> None:
    heads, kv_heads, head_dim, block = shape
    given = inputs([70, 3], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block=block)
    check(given, SLIDING, WHOLE_CONTEXT, 1)


DTYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "fp8-cache": (torch.bfloat16, torch.float8_e4m3fn),
    "float32-cache": (torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES.values(), ids=DTYPES)
def test_dtypes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    given = inputs([270, 5], dtype=dtype, cache_dtype=cache_dtype)
    check(given, CAUSAL, WHOLE_CONTEXT, 2)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_request_with_only_dead_entries_sees_its_block(splits: int) -> None:
    q, k, v, old, entries, seq_lens = inputs([260])
    entries[:, :260] = -1
    check((q, k, v, old, entries, seq_lens), FULL, WHOLE_CONTEXT, splits)


def test_no_requests_and_no_columns() -> None:
    check(inputs([]), FULL, WHOLE_CONTEXT, 2)
    check(inputs([0, 0], columns=0), FULL, WHOLE_CONTEXT, 1)


def test_scores_of_any_size() -> None:
    """The running maximum is subtracted before the exponential."""
    q, k, v, old, entries, seq_lens = inputs([200])
    check((q * 300, k, v, old, entries, seq_lens), FULL, WHOLE_CONTEXT, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: (g[0][..., :12], *g[1:]), "q: head dim 12"),
        (lambda g: (g[0][:, :, :3], *g[1:]), "q: 3 heads are no multiple of k's 2"),
        (lambda g: (*g[:3], g[3].mT.contiguous().mT, *g[4:]), "old: strides"),
    ],
    ids=["head-dim", "heads", "strides"],
)
def test_what_is_not_served_is_refused(change, message: str) -> None:
    given: Given = change(inputs([3]))
    with pytest.raises(ValueError, match=message):
        block_attention.block_attention(torch.empty(given[0].shape), *given, FULL, None)


@needs_interpreter
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("reach", [Reach(), Reach(24, 3)], ids=["whole", "sinks"])
@pytest.mark.parametrize("layer", [FULL, SLIDING], ids=["full", "sliding"])
def test_traffic(layer: LayerAttention, reach: Reach, splits: int) -> None:
    lengths = [1, 0, 15, 650]
    given = inputs(
        lengths,
        heads=12,
        kv_heads=1,
        block=6 + 6 * (splits > 1),  # 2 tiles of query rows with splits
        columns=700,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        reach=reach,
    )
    q, entries = given[0], given[4]
    out, space = torch.empty(q.shape, dtype=q.dtype), workspace(q, 1, splits)
    with counted_bytes() as count:
        block_attention.block_attention(out, *given, replace(layer, reach=reach), space, splits)
    dead = 0
    for row, length in enumerate(lengths):
        used = min(700, reach.tokens_read(length))
        first = 0
        # Of these lengths, 650 is past the layer's window, with all sinks out of sight.
        if layer.sliding_window is not None and length == 650:
            first = max(used - layer.sliding_window + 1, reach.sinks)
        dead += int((entries[row, first:used] < 0).sum())
    assert count.traffic == block_attention.traffic(
        tuple(q.shape), 1, 700, lengths, replace(layer, reach=reach), Splits(splits, splits), 2, 1,
        dead,
    )  # fmt: skip


@needs_interpreter
def test_bytes_grow_with_the_window_not_with_the_context() -> None:
    reach = Reach(24, 3)

    def bytes_at(length: int) -> int:
        given = inputs([length], reach=reach, columns=27)
        with counted_bytes() as count:
            out, layer = torch.empty(given[0].shape), replace(FULL, reach=reach)
            block_attention.block_attention(out, *given, layer, None)
        return count.read - int((given[4] >= 0).sum()) * 2 * 2 * 16 * 4

    assert bytes_at(100) == bytes_at(100000)
