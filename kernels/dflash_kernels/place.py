"""Entries of a ring for a step's tokens: three launches. Names as in `gated_delta_fold`.

Letters in shapes: N tokens, E entries of the ring; M chunks of the ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.kv import Tags

# Entries of a chunk; tokens of a program; counts, and flags of tokens, that are summed at a time.
CHUNK = 2048
BLOCK = 256
TILE = 1024


@triton.jit
def _sum(p_values, COUNT, TILE: tl.constexpr):
    """The sum of COUNT integers or flags."""
    b_sum = tl.zeros((TILE,), tl.int32)
    for i_first in range(0, COUNT, TILE):
        o = i_first + tl.arange(0, TILE)
        b_sum += tl.load(p_values + o, mask=o < COUNT, other=0).to(tl.int32)
    return tl.sum(b_sum)


@triton.jit(do_not_specialize=["p_live", "M", "N", "E"])
def count_unused_kernel(
    p_counts, p_in_use, p_cursor, p_live, M, N, E,
    HAS_LIVE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per chunk: of its unused entries, how many there are, and how many are before the
    cursor. One more counts the live tokens."""
    i_m = tl.program_id(0)
    if i_m == M:
        i_live = N
        if HAS_LIVE:
            i_live = _sum(p_live, N, TILE)
        tl.store(p_counts + 2 * M, i_live)
    else:
        o_e = i_m * CHUNK + tl.arange(0, CHUNK)
        b_unused = 1 - tl.load(p_in_use + o_e, mask=o_e < E, other=1).to(tl.int32)
        b_before = tl.where(o_e < tl.load(p_cursor), b_unused, 0)
        tl.store(p_counts + i_m, tl.sum(b_unused))
        tl.store(p_counts + M + i_m, tl.sum(b_before))


@triton.jit(do_not_specialize=["M", "E", "SHARE"])
def rank_entries_kernel(
    p_of_rank, p_counts, p_in_use, p_cursor, M, E, SHARE,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per chunk: its entries to the ranks of the tokens that take them."""
    i_m = tl.program_id(0)
    o_e = i_m * CHUNK + tl.arange(0, CHUNK)
    i_unused = _sum(p_counts, M, TILE)
    i_stored = tl.load(p_counts + 2 * M)
    i_stored = tl.minimum(i_stored, tl.minimum(tl.maximum(i_unused, SHARE), E))
    if i_unused < tl.maximum(i_stored, 1):
        # The oldest are overwritten: all are free.
        i_free, i_before = E, tl.load(p_cursor).to(tl.int32)
        b_free, b_number = (o_e < E).to(tl.int32), o_e
    else:
        i_free, i_before = i_unused, _sum(p_counts + M, M, TILE)
        b_free = 1 - tl.load(p_in_use + o_e, mask=o_e < E, other=1).to(tl.int32)
        b_number = _sum(p_counts, i_m, TILE) + tl.cumsum(b_free, 0) - 1
    # The ranks of the free entries, from the cursor on.
    b_rank = b_number - i_before
    b_rank = tl.where(b_rank < 0, b_rank + i_free, b_rank)
    tl.store(p_of_rank + b_rank, o_e, mask=(b_free > 0) & (b_rank < i_stored))


@triton.jit(do_not_specialize=["p_slots", "p_live", "M", "N", "E", "SHARE"])
def place_kernel(
    p_out, p_entry_of, p_owner, p_in_use, p_cursor, p_slots, p_live, p_of_rank, p_counts,
    M, N, E, SHARE, HAS_LIVE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK tokens: their entries, and all tags."""
    i_first = tl.program_id(0) * BLOCK
    o_n = i_first + tl.arange(0, BLOCK)
    m_n = o_n < N
    m_placed, b_rank = m_n, o_n
    if HAS_LIVE:
        b_live = tl.load(p_live + o_n, mask=m_n, other=0).to(tl.int32)
        m_placed = b_live > 0
        b_rank = _sum(p_live, i_first, TILE) + tl.cumsum(b_live, 0) - 1
    i_live = tl.load(p_counts + 2 * M)
    i_stored = tl.minimum(i_live, tl.minimum(tl.maximum(_sum(p_counts, M, TILE), SHARE), E))
    # The first live tokens are those that do not fit.
    b_rank -= i_live - i_stored
    m_placed = m_placed & (b_rank >= 0)
    b_entry = tl.load(p_of_rank + b_rank, mask=m_placed, other=0)
    b_tag = tl.where(m_placed, b_entry, E)
    b_slot = tl.load(p_slots + o_n, mask=m_n, other=0)
    tl.store(p_out + o_n, tl.where(m_placed, b_entry, -1).to(tl.int64), mask=m_n)
    tl.store(p_entry_of + b_slot, b_tag, mask=m_n)
    tl.store(p_owner + b_entry, b_slot.to(tl.int32), mask=m_placed)
    tl.store(p_in_use + b_tag, m_n, mask=m_n)
    # After the newest token's entry.
    b_next = tl.where(b_entry + 1 == E, 0, b_entry + 1).to(tl.int64)
    tl.store(p_cursor + 0 * o_n, b_next, mask=m_placed & (b_rank == i_stored - 1))


def place_in_ring(
    tags: Tags, cursor: Tensor, target_slots: Tensor, live: Tensor | None, fair_share: int | None
) -> Tensor:
    """See its twin in `drafting.kv.place`, whose arguments and result these are.

    Raises:
        ValueError: `target_slots` or `live` is not contiguous.
    """
    for name, values in (("target_slots", target_slots), ("live", live)):
        if values is not None and not values.is_contiguous():
            raise ValueError(f"{name}: strides {values.stride()}; unit stride is required")
    entry_of, owner, in_use = tags
    count, entries = len(target_slots), len(owner) - 1
    placed = torch.empty(count, dtype=torch.int64, device=target_slots.device)
    if not count:
        return placed
    chunks = triton.cdiv(entries, CHUNK)
    counts = torch.empty(2 * chunks + 1, dtype=torch.int32, device=placed.device)
    of_rank = torch.empty(min(count, entries), dtype=torch.int32, device=placed.device)
    share = entries if fair_share is None else fair_share
    flags, tile = {"HAS_LIVE": live is not None}, {"TILE": TILE}
    count_unused_kernel[(chunks + 1,)](
        counts, in_use, cursor, live, chunks, count, entries, **flags, CHUNK=CHUNK, **tile
    )
    rank_entries_kernel[(chunks,)](
        of_rank, counts, in_use, cursor, chunks, entries, share, CHUNK=CHUNK, **tile
    )
    place_kernel[(triton.cdiv(count, BLOCK),)](
        placed, entry_of, owner, in_use, cursor, target_slots, live, of_rank, counts,
        chunks, count, entries, share, **flags, BLOCK=BLOCK, **tile,
    )  # fmt: skip
    return placed


def traffic(count: int, entries: int) -> Traffic:
    """Bytes of the three launches, if a mask is given, all tokens are live and the unused entries
    are enough."""
    chunks, programs = triton.cdiv(entries, CHUNK), triton.cdiv(count, BLOCK)
    counted = 8 * chunks + entries + count
    ranked = entries + chunks * (4 + 4 * chunks + 4 * chunks) + 2 * chunks * (chunks - 1)
    # A program counts the live tokens before its own.
    live_before = BLOCK * programs * (programs - 1) // 2
    placed = programs * (4 + 4 * chunks) + live_before + count * (1 + 4 + 8)
    return Traffic(
        read_bytes=counted + ranked + placed,
        written_bytes=4 * (2 * chunks + 1) + count * (4 + 8 + 4 + 4 + 1) + 8,
    )
