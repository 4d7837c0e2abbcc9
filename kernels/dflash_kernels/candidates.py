"""The K largest logits of each row, in two launches: the largest of every chunk of columns, and
then the K largest logits of the K best chunks. No others can be among them. Names as in
`gated_delta_fold`.

Sorting takes some 300 instructions per value, so few values are sorted: reading the logits once
takes longer than computing.

Letters in shapes: N rows, V columns, K that are taken, C chunks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.noise import inverse_temperature
from dflash_kernels.traffic import Traffic
from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES

# Columns of a chunk, and chunks of a program.
CHUNK, CHUNKS = 64, 64
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _ordered(b):
    """Integers in the order of floats, but that -0 is -1. NaN of any sign is the largest."""
    b_bits = b.to(tl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) & _LAST)
    return tl.where(b != b, _LAST, b_bits)


@triton.jit
def _keys(b_values, o):
    """int64 that order as values of `_ordered` do, and of equal ones the one of the lower offset is
    the larger."""
    # Both zeros are equal.
    b_values = tl.where(b_values == -1, 0, b_values)
    return (b_values.to(tl.int64) << 32) | (o ^ _LAST).to(tl.int64)


@triton.jit
def _offsets(b_keys):
    return (b_keys & _LAST) ^ _LAST


@triton.jit(do_not_specialize=["p_sums", "POSITIONS"])
def largest_of_chunks_kernel(
    p_largest, p_maxima, p_sums, p_logits, p_temperatures, s_logits, V, C, POSITIONS,
    HAS_SUMS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per row and CHUNKS chunks."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    o_v = o_c[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    b = tl.load(p_logits + i_n * s_logits + o_v, mask=o_v < V, other=float("-inf"))
    b = b.to(tl.float32)
    tl.store(p_largest + i_n * C + o_c, tl.max(_ordered(b), 1), mask=o_c < C)
    if HAS_SUMS:
        i_scale = inverse_temperature(p_temperatures + i_n // POSITIONS)
        i_max = tl.max(b)
        b_weights = tl.exp((b - i_max) * i_scale)
        # Also where all are, and the difference is NaN.
        b_weights = tl.where(b == float("-inf"), 0.0, b_weights)
        i_part = i_n * tl.num_programs(1) + tl.program_id(1)
        tl.store(p_maxima + i_part, i_max)
        tl.store(p_sums + i_part, tl.sum(b_weights))


@triton.jit
def candidates_kernel(
    p_values, p_columns, p_largest, p_logits, s_logits, V, C,
    K: tl.constexpr, TOP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c, o_k = tl.arange(0, BLOCK), tl.arange(0, TOP)
    # What is no chunk is less than any.
    b_largest = tl.load(p_largest + i_n * C + o_c, mask=o_c < C, other=-(2**31))
    b_chunks = _offsets(tl.topk(_keys(b_largest, o_c), TOP)).to(tl.int32)
    o_v = b_chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    p_row = p_logits + i_n * s_logits
    # What is no column is as little as any, and has a higher number than all: K others precede it.
    b = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf"))
    b_keys = _keys(_ordered(b.to(tl.float32)), o_v)
    b_columns = _offsets(tl.topk(tl.reshape(b_keys, (TOP * CHUNK,)), TOP))
    b_values = tl.load(p_row + b_columns, mask=o_k < K, other=0.0)
    tl.store(p_values + i_n * K + o_k, b_values, mask=o_k < K)
    tl.store(p_columns + i_n * K + o_k, b_columns, mask=o_k < K)


def top(k: int) -> int:
    """Chunks, and then columns, that a program takes for the k largest."""
    return max(2, triton.next_power_of_2(k))


def block(columns: int, k: int) -> int:
    """Chunks that `candidates_kernel` looks at, and no chunks beside them."""
    return max(top(k), triton.next_power_of_2(triton.cdiv(columns, CHUNK)))


class Sums(NamedTuple):
    """Sums of exp(logit / temperature) over parts of the rows, of `part_count` columns each.

    Attributes:
        maxima: float32 `[N, PARTS]`, written: the largest logit of each part.
        sums: float32 `[N, PARTS]`, written, divided by exp(maximum / temperature).
        temperatures: float32 `[R]`, of N / R rows each; 0 counts as 1.
    """

    maxima: Tensor
    sums: Tensor
    temperatures: Tensor


def part_count(width: int) -> int:
    """The parts of a row of that many columns."""
    return triton.cdiv(width, CHUNK * CHUNKS)


def candidates(values: Tensor, columns: Tensor, logits: Tensor, sums: Sums | None = None) -> None:
    """Write each row's K largest logits in descending order, and their columns; of equal ones the
    lower column first. NaN is larger than all others.

    Args:
        values: `[N, K]`, contiguous, written. K is at most `MOST_CANDIDATES` and at most V.
        columns: int64 `[N, K]`, contiguous, written.
        logits: `[N, V]`, rows of any stride.
        sums: what else to compute of the logits; None for nothing.
    """
    count, k = values.shape
    if k > MOST_CANDIDATES:
        raise ValueError(f"values: {k} of each row; at most {MOST_CANDIDATES} can be taken")
    if not count:
        return
    best, width = largest_of_chunks(logits, sums), logits.shape[1]
    candidates_kernel[(count,)](
        values, columns, best, logits, logits.stride(0), width, best.shape[1],
        K=k, TOP=top(k), CHUNK=CHUNK, BLOCK=block(width, k), num_warps=8,
    )  # fmt: skip


def largest_of_chunks(logits: Tensor, sums: Sums | None) -> Tensor:
    """The largest of every chunk of columns, int32 `[N, C]`; the `sums` are written."""
    count, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    best = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    maxima, totals, temperatures = sums or (None, None, None)
    positions = 1 if temperatures is None else count // len(temperatures)
    largest_of_chunks_kernel[(count, part_count(width))](
        best, maxima, totals, logits, temperatures, logits.stride(0), width, chunks, positions,
        HAS_SUMS=sums is not None, CHUNK=CHUNK, CHUNKS=CHUNKS, num_warps=8,
    )  # fmt: skip
    return best


def chunk_traffic(count: int, width: int, itemsize: int, sums: bool = False) -> Traffic:
    """Bytes of the first launch; logits have elements of `itemsize` bytes."""
    parts = part_count(width) * sums
    read = count * (width * itemsize + 4 * parts)
    return Traffic(read, count * (4 * triton.cdiv(width, CHUNK) + 8 * parts))


def traffic(count: int, width: int, k: int, itemsize: int) -> Traffic:
    """Bytes of the second one, of a width that is a multiple of `CHUNK`."""
    looked_at = min(top(k) * CHUNK, width) + k
    read = 4 * triton.cdiv(width, CHUNK) + looked_at * itemsize
    return Traffic(count * read, count * k * (itemsize + 8))
