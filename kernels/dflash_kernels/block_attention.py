"""Attention of drafted blocks over context entries, read through a table without a copy, and over
the block's own K/V. Context is split over programs; a second kernel merges the splits.

Letters in shapes: R requests, B block positions, C table columns, S entries, L layers, H query
heads, G kv heads, D head dim, P splits, M = B H / G query rows that share a kv head. Names as in
`gated_delta_fold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.drafting.attention.capabilities import LONGEST_SPLIT, TRITON_HEAD_DIMS, Splits

# Fewer tiles than these are not split further: a split costs its output twice, written and read.
MIN_TILES = tl.constexpr(4)
MERGE_ROWS = 8
LONGEST = tl.constexpr(LONGEST_SPLIT)
LOG2_E = 1.4426950408889634


@triton.jit
def _span(i_len, LIMIT, EACH, WINDOW: tl.constexpr, SINKS: tl.constexpr,
          BLOCK_N: tl.constexpr):  # fmt: skip
    """First column in sight, the column after the last one, and columns per split, see `Splits`."""
    i_used = tl.minimum(i_len, LIMIT)
    i_first = i_used * 0
    # With no sink in sight, the layer's window is a suffix of the columns.
    if WINDOW > 0 and i_len - SINKS + 1 >= WINDOW:
        i_first = tl.maximum(i_used - WINDOW + 1, SINKS)
    i_seen = tl.maximum(i_used - i_first, 0)
    i_splits = tl.maximum(tl.cdiv(i_seen, LONGEST), EACH)
    i_share = tl.maximum(tl.cdiv(tl.cdiv(i_seen, BLOCK_N), i_splits), MIN_TILES)
    return i_first, i_used, i_share * BLOCK_N


@triton.jit
def _attend(b_q, b_k, b_v, m_seen, b_max, b_sum, b_acc, SCALE):
    """Add keys `[n, D]` and values `[n, D]` to a running softmax in base 2."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * SCALE
    b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    # A row that has seen nothing yet keeps -inf, and weights of 0.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_shrink[:, None]
    b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return b_new, b_sum, b_acc


@triton.jit
def _inside(m_seen, o_behind, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return `m_seen` without the keys of the block that a query does not see `o_behind` back."""
    if CAUSAL:
        m_seen &= o_behind >= 0
    if WINDOW > 0:
        m_seen &= o_behind < WINDOW
    return m_seen


# Batches and contexts of any size share a compilation.
@triton.jit(do_not_specialize=["s_entries_r", "EACH", "LIMIT"])
def block_attention_kernel(
    p_q, p_k, p_v, p_old_k, p_old_v, p_entries, p_seq_lens, p_out, p_partial, p_lse,
    s_q_r, s_q_b, s_q_h, s_k_r, s_k_b, s_k_h, s_v_r, s_v_b, s_v_h,
    s_old_s, s_old_h, s_entries_r, s_out_r, s_out_b, s_out_h, SCALE, EACH, LIMIT,
    B: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One program per request, BLOCK_M rows of a kv head, and split. Split 0 has the block."""
    M_TILES: tl.constexpr = (B * GROUPS + BLOCK_M - 1) // BLOCK_M
    i_r, i_p = tl.program_id(0).to(tl.int64), tl.program_id(2)
    i_g, i_m = tl.program_id(1).to(tl.int64) // M_TILES, tl.program_id(1) % M_TILES
    n_splits = tl.num_programs(2)
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    i_first, i_used, i_share = _span(i_len, LIMIT, EACH, WINDOW, SINKS, BLOCK_N)
    i_begin = i_first + i_p * i_share
    if i_p > 0 and i_begin >= i_used:
        return
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d, o_b = tl.arange(0, D), tl.arange(0, BLOCK_B)
    o_i, o_h = o_m // GROUPS, i_g * GROUPS + o_m % GROUPS
    m_m = o_m < B * GROUPS
    p_q += i_r * s_q_r + o_i[:, None] * s_q_b + o_h[:, None] * s_q_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None], other=0.0)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    # The block's own keys: no lane is loaded by the other splits.
    m_b = (o_b < B) & (i_p == 0)
    p_k += i_r * s_k_r + i_g * s_k_h + o_b[:, None] * s_k_b + o_d[None, :]
    p_v += i_r * s_v_r + i_g * s_v_h + o_b[:, None] * s_v_b + o_d[None, :]
    b_k = tl.load(p_k, mask=m_b[:, None], other=0.0).to(b_q.dtype)
    b_v = tl.load(p_v, mask=m_b[:, None], other=0.0).to(b_q.dtype)
    o_behind = o_i[:, None] - o_b[None, :]
    m_seen = _inside(m_m[:, None] & m_b[None, :], o_behind, CAUSAL, WINDOW)
    b_max, b_sum, b_acc = _attend(b_q, b_k, b_v, m_seen, b_max, b_sum, b_acc, SCALE)
    p_entries += i_r * s_entries_r
    p_old_k += i_g * s_old_h + o_d[None, :]
    p_old_v += i_g * s_old_h + o_d[None, :]
    for i_n in range(i_begin, tl.minimum(i_used, i_begin + i_share), BLOCK_N):
        o_c = i_n + tl.arange(0, BLOCK_N)
        b_entry = tl.load(p_entries + o_c, mask=o_c < i_used, other=-1)
        m_c = b_entry >= 0
        o_old = b_entry.to(tl.int64)[:, None] * s_old_s
        b_old_k = tl.load(p_old_k + o_old, mask=m_c[:, None], other=0.0).to(b_q.dtype)
        b_old_v = tl.load(p_old_v + o_old, mask=m_c[:, None], other=0.0).to(b_q.dtype)
        m_old = m_m[:, None] & m_c[None, :]
        if WINDOW > 0:
            o_end = tl.where(o_c < SINKS, i_len, i_used) - o_c
            m_old &= o_i[:, None] + o_end[None, :] < WINDOW
        b_max, b_sum, b_acc = _attend(b_q, b_old_k, b_old_v, m_old, b_max, b_sum, b_acc, SCALE)
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    if IS_SPLIT:
        o_head = i_r * (tl.num_programs(1) // M_TILES) + i_g
        o_row = (o_head * n_splits + i_p) * (B * GROUPS) + o_m
        tl.store(p_partial + o_row[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None])
        tl.store(p_lse + o_row, b_max + tl.log2(b_sum), mask=m_m)
    else:
        p_out += i_r * s_out_r + o_i[:, None] * s_out_b + o_h[:, None] * s_out_h + o_d[None, :]
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None])


@triton.jit(do_not_specialize=["LIMIT", "SPLITS", "EACH"])
def merge_kernel(
    p_out, p_partial, p_lse, p_seq_lens, s_out_r, s_out_b, s_out_h, LIMIT, SPLITS, EACH,
    B: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program per request, kv head and BLOCK_M query rows."""
    i_r, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_m, o_d = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    m_m = o_m < B * GROUPS
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    i_first, i_used, i_share = _span(i_len, LIMIT, EACH, WINDOW, SINKS, BLOCK_N)
    o_row = (i_r * tl.num_programs(1) + i_g) * SPLITS * (B * GROUPS) + o_m
    # Split 0 has seen the block, so its sum is finite.
    b_max = tl.load(p_lse + o_row, mask=m_m, other=0.0)
    b_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    b_acc = tl.load(p_partial + o_row[:, None] * D + o_d[None, :], mask=m_m[:, None], other=0.0)
    for i_p in range(1, tl.cdiv(tl.maximum(i_used - i_first, 0), i_share)):
        o_split = o_row + i_p * (B * GROUPS)
        b_lse = tl.load(p_lse + o_split, mask=m_m, other=0.0)
        p_split = p_partial + o_split[:, None] * D + o_d[None, :]
        b_new = tl.maximum(b_max, b_lse)
        b_shrink, b_weight = tl.exp2(b_max - b_new), tl.exp2(b_lse - b_new)
        b_acc *= b_shrink[:, None]
        b_acc += b_weight[:, None] * tl.load(p_split, mask=m_m[:, None], other=0.0)
        b_sum, b_max = b_sum * b_shrink + b_weight, b_new
    p_out += i_r * s_out_r + (o_m // GROUPS)[:, None] * s_out_b + o_d[None, :]
    p_out += (i_g * GROUPS + o_m % GROUPS)[:, None] * s_out_h
    tl.store(p_out, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_m[:, None])


class Workspace(NamedTuple):
    """Outputs of the splits, for `merge_kernel`.

    Attributes:
        partial: float32 `[R, G, P, M, D]`.
        lse: float32 `[R, G, P, M]`, log2 of the sum of the split's weights.
    """

    partial: Tensor
    lse: Tensor


class Tiles(NamedTuple):
    """Sizes of a launch: query rows, columns and block positions of a tile, warps, stages."""

    rows: int
    columns: int
    block: int
    warps: int
    stages: int


def tiles(
    block: int,
    groups: int,
    head_dim: int,
    itemsize: int,
    cache_itemsize: int,
    is_split: bool = False,
) -> Tiles:
    """Tile sizes that compile without spills (tests/kernels/registers.json). Queries in float32 are
    for checks: they are multiplied without tensor cores, and spill registers.

    Args:
        block: B.
        groups: H / G.
        itemsize: bytes of an element of q.
        cache_itemsize: bytes of an element of the cache.
        is_split: whether the context is.
    """
    rows = max(16, triton.next_power_of_2(block * groups))
    size = max(16, triton.next_power_of_2(block))
    if itemsize == 4:
        return Tiles(min(rows, 64), 32 if head_dim <= 128 else 16, size, warps=8, stages=1)
    columns = 64 if head_dim <= 64 else 32 if head_dim * cache_itemsize <= 512 else 16
    rows = min(rows, 128 if head_dim <= 128 else 64)
    warps = 8 if rows > 64 or head_dim > 128 else 4
    # Splits are for few requests. A multiprocessor then has one program, which would wait while it
    # reads entry numbers: a third stage reads them ahead. 8 warps have no registers for it, and
    # 8-bit caches would spill.
    ahead = is_split and warps == 4 and cache_itemsize > 1
    return Tiles(rows, columns, size, warps, stages=3 if ahead else 2)


def block_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    old: Tensor,
    entries: Tensor,
    seq_lens: Tensor,
    layer: LayerAttention,
    workspace: Workspace | None,
    each: int = 1,
) -> None:
    """softmax(q k^T / sqrt(D)) v over the live context and the block: one launch, and one more to
    merge if there is a workspace.

    Args:
        out: `[R, B, H, D]`, written.
        q: `[R, B, H, D]`, after norm and RoPE.
        k, v: `[R, B, G, D]`, the block's own. Any strides with unit stride over D, as of q.
        old: `[S, 2, G, D]`, the cache's K/V of this layer, in any float dtype; float8 is converted
            without a scale.
        entries: int32 `[R, C]`, from `context_table`. Columns past a request's are not read.
        seq_lens: int `[R]`, committed tokens: the position of the block's first token. 0 leaves
            the block only.
        layer: what the layer sees; its reach is that of `context_table`.
        workspace: for P splits at most; None for one.
        each: splits of a short context, see `Splits`.

    Raises:
        ValueError: the head dim is not served, or a tensor has another layout.
    """
    requests, block, heads, head_dim = q.shape
    _check(out, q, k, v, old, entries)
    groups, splits = heads // k.shape[2], 1 if workspace is None else workspace.lse.shape[2]
    limit, sinks = layer.reach.tokens_read(entries.shape[1]), layer.reach.sinks
    partial, lse = workspace or (out, out)
    if not requests:
        return
    tile = tiles(block, groups, head_dim, q.element_size(), old.element_size(), splits > 1)
    shape = {"B": block, "GROUPS": groups, "D": head_dim, "WINDOW": layer.sliding_window or 0,
             "SINKS": sinks, "BLOCK_N": tile.columns}  # fmt: skip
    row_tiles = triton.cdiv(block * groups, tile.rows)
    block_attention_kernel[(requests, k.shape[2] * row_tiles, splits)](
        q, k, v, old[:, 0], old[:, 1], entries, seq_lens, out, partial, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        old.stride(0), old.stride(2), entries.stride(0), *out.stride()[:3],
        LOG2_E * head_dim**-0.5, each, limit,
        CAUSAL=layer.causal, IS_SPLIT=splits > 1, BLOCK_M=tile.rows, BLOCK_B=tile.block, **shape,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(requests, k.shape[2], triton.cdiv(block * groups, MERGE_ROWS))](
            out, partial, lse, seq_lens, *out.stride()[:3], limit, splits, each,
            BLOCK_M=MERGE_ROWS, **shape, num_warps=2,
        )  # fmt: skip


def _check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, old: Tensor, entries: Tensor) -> None:
    if q.shape[-1] not in TRITON_HEAD_DIMS:
        raise ValueError(f"q: head dim {q.shape[-1]}; one of {sorted(TRITON_HEAD_DIMS)} is served")
    named = {"out": out, "q": q, "k": k, "v": v, "old": old, "entries": entries}
    for name, tensor in named.items():
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: strides {tensor.stride()}; the last must be 1")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q: {q.shape[2]} heads are no multiple of k's {k.shape[2]}")


def traffic(
    q_shape: tuple[int, int, int, int],
    kv_heads: int,
    columns: int,
    seq_lens: Sequence[int],
    layer: LayerAttention,
    splits: Splits,
    itemsize: int,
    cache_itemsize: int,
    dead: int = 0,
) -> Traffic:
    """Bytes of one call of `block_attention`, with int64 `seq_lens`.

    Args:
        q_shape: `(R, B, H, D)`.
        columns: C.
        splits: P at most.
        itemsize: bytes of an element of q, k, v and out.
        cache_itemsize: bytes of an element of the cache.
        dead: columns in the layer's sight whose entry is dead, over all requests.
    """
    requests, block, heads, head_dim = q_shape
    groups, rows = heads // kv_heads, block * heads
    tile = tiles(block, groups, head_dim, itemsize, cache_itemsize)
    row_tiles = triton.cdiv(block * groups, tile.rows)
    limit, sinks = layer.reach.tokens_read(columns), layer.reach.sinks
    in_sight = programs = 0
    for length in seq_lens:
        used, first = min(length, limit), 0
        if layer.sliding_window and length - sinks + 1 >= layer.sliding_window:
            first = max(used - layer.sliding_window + 1, sinks)
        visible = max(used - first, 0)
        parts = max(splits.each, triton.cdiv(visible, LONGEST_SPLIT))
        share = max(triton.cdiv(triton.cdiv(visible, tile.columns), parts), MIN_TILES.value)
        programs += max(1, triton.cdiv(visible, share * tile.columns))
        in_sight += visible
    # Every tile of query rows reads the keys and values.
    read_bytes = requests * block * 2 * kv_heads * head_dim * itemsize
    read_bytes += in_sight * kv_heads * 4
    read_bytes += (in_sight - dead) * 2 * kv_heads * head_dim * cache_itemsize
    read_bytes = (read_bytes + requests * splits.most * kv_heads * 8) * row_tiles
    read_bytes += programs * rows * head_dim * itemsize
    written_bytes = requests * rows * head_dim * itemsize
    if splits.most > 1:
        merges = triton.cdiv(block * groups, MERGE_ROWS)
        between = programs * rows * (head_dim + 1) * 4
        read_bytes += requests * kv_heads * merges * 8 + between
        written_bytes += between
    return Traffic(read_bytes, written_bytes)
