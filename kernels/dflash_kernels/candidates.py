"""The K largest logits of each row, which are read once, in two launches. Names as in
`gated_delta_fold`.

A logit and its column are one int64 that orders as they do: the logit's bits above, and below them
the column, so that of equal logits the one of the lower column is the larger.

Letters in shapes: N rows, V columns, K that are taken, S splits of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic

# Columns of a split, at most.
BLOCK = 4096
# Beyond it, a program of `merge_candidates_kernel` would not fit.
MOST = 64
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def candidates_kernel(p_keys, p_logits, s_logits, V, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and split."""
    i_n, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    p_row = p_logits + i_n * s_logits
    b_logits = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
    b_bits = tl.where(b_logits == 0.0, 0.0, b_logits).to(tl.int32, bitcast=True)
    # Integers in the order of the floats. Both zeros are equal; NaN of any sign is the largest.
    b_bits = b_bits ^ ((b_bits >> 31) & _LAST)
    b_bits = tl.where(b_logits != b_logits, _LAST, b_bits)
    b_keys = (b_bits.to(tl.int64) << 32) | (o_v ^ _LAST).to(tl.int64)
    p_split = p_keys + (i_n * tl.num_programs(1) + i_s) * TOP
    tl.store(p_split + tl.arange(0, TOP), tl.topk(b_keys, TOP))


@triton.jit
def merge_candidates_kernel(
    p_values, p_columns, p_keys, p_logits, s_logits, TOTAL,
    K: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row, whose splits have TOTAL candidates."""
    i_n = tl.program_id(0).to(tl.int64)
    o_s, o_k = tl.arange(0, BLOCK), tl.arange(0, TOP)
    # Less than any key.
    b_keys = tl.load(p_keys + i_n * TOTAL + o_s, mask=o_s < TOTAL, other=-(2**63))
    b_columns = (tl.topk(b_keys, TOP) & _LAST) ^ _LAST
    b_values = tl.load(p_logits + i_n * s_logits + b_columns, mask=o_k < K, other=0.0)
    tl.store(p_values + i_n * K + o_k, b_values, mask=o_k < K)
    tl.store(p_columns + i_n * K + o_k, b_columns, mask=o_k < K)


def top(k: int) -> int:
    """What a program takes of its columns for the k largest."""
    return max(2, triton.next_power_of_2(k))


def block(columns: int) -> int:
    """Columns of a split."""
    return min(BLOCK, triton.next_power_of_2(columns))


def splits(columns: int) -> int:
    """Programs per row."""
    return triton.cdiv(columns, block(columns))


def candidates(values: Tensor, columns: Tensor, logits: Tensor) -> None:
    """Of each row the K largest logits in descending order, and their columns; of equal ones the
    lower column first. NaN is larger than all others.

    Args:
        values: `[N, K]`, contiguous, written. K is at most `MOST` and V.
        columns: int64 `[N, K]`, contiguous, written.
        logits: `[N, V]`, rows of any stride.
    """
    count, k = values.shape
    if not count:
        return
    width, total = logits.shape[1], splits(logits.shape[1]) * top(k)
    keys = torch.empty(count, total, dtype=torch.int64, device=logits.device)
    candidates_kernel[(count, splits(width))](
        keys, logits, logits.stride(0), width, TOP=top(k), BLOCK=block(width), num_warps=8
    )
    merge_candidates_kernel[(count,)](
        values, columns, keys, logits, logits.stride(0), total,
        K=k, TOP=top(k), BLOCK=triton.next_power_of_2(total), num_warps=4,
    )  # fmt: skip


def traffic(count: int, width: int, k: int, itemsize: int) -> Traffic:
    """Bytes of the first launch; logits have elements of `itemsize` bytes."""
    return Traffic(count * width * itemsize, 8 * count * splits(width) * top(k))


def merge_traffic(count: int, total: int, k: int, itemsize: int) -> Traffic:
    """Bytes of the second one, of `total` candidates per row."""
    return Traffic(count * (8 * total + k * itemsize), count * k * (itemsize + 8))
