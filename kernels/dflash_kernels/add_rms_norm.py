"""Residual add and RMSNorm in one launch. Names as in `gated_delta_fold`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic


@triton.heuristics(
    {
        "HAS_RESIDUAL": lambda args: args["p_residual"] is not None,
        "HAS_BIAS": lambda args: args["p_bias"] is not None,
    }
)
@triton.jit(do_not_specialize=["N", "ROWS"])
def add_rms_norm_kernel(
    p_out, p_x, p_residual, p_bias, p_weight, s_out, s_x, s_residual, N, ROWS, E, EPS,
    BLOCK_E: tl.constexpr, STORE_SUM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per ROWS tokens, which load weight and bias once."""
    o_e = tl.arange(0, BLOCK_E)
    b_weight = tl.load(p_weight + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    for i in range(ROWS):
        i_n = tl.program_id(0).to(tl.int64) * ROWS + i
        m_e = (o_e < E) & (i_n < N)
        b_x = tl.load(p_x + i_n * s_x + o_e, mask=m_e, other=0.0)
        # Sums are rounded where torch rounds them.
        if HAS_BIAS:
            b_x = (b_x.to(tl.float32) + b_bias).to(b_x.dtype)
        if HAS_RESIDUAL:
            p_row = p_residual + i_n * s_residual + o_e
            b_residual = tl.load(p_row, mask=m_e, other=0.0)
            b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(b_residual.dtype)
            if STORE_SUM:
                tl.store(p_row, b_x, mask=m_e)
        b_x = b_x.to(tl.float32)
        b_x *= tl.rsqrt(tl.sum(b_x * b_x) / E + EPS) * b_weight
        tl.store(p_out + i_n * s_out + o_e, b_x.to(p_out.dtype.element_ty), mask=m_e)


def rows(count: int) -> int:
    """Tokens per program: several, if their programs still fill a GPU."""
    return 4 if count >= 512 else 1


def warps(width: int) -> int:
    """Warps of a program for rows of that many elements."""
    return min(16, max(1, triton.next_power_of_2(width) // 512))


def add_rms_norm(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    store_sum: bool = True,
) -> None:
    """residual += x + bias, out = RMSNorm(residual) * weight.

    Args:
        out: `[N, E]`, written; may be x.
        x: `[N, E]`, rows of any stride.
        residual: `[N, E]`, updated in place. None: out = RMSNorm(x + bias) * weight.
        weight: `[E]`.
        bias: `[E]`, of the projection that made x; None for none.
        store_sum: if False, `residual` is left as it is.
    """
    count, width = x.shape
    if not count:
        return
    add_rms_norm_kernel[(triton.cdiv(count, rows(count)),)](
        out, x, residual, bias, weight,
        out.stride(0), x.stride(0), 0 if residual is None else residual.stride(0),
        count, rows(count), width, eps, BLOCK_E=triton.next_power_of_2(width),
        STORE_SUM=store_sum, num_warps=warps(width),
    )  # fmt: skip


def traffic(
    count: int, width: int, itemsize: int, *, residual: bool, bias: bool, store_sum: bool = True
) -> Traffic:
    """Bytes of one launch; all tensors have elements of `itemsize` bytes."""
    row, programs = width * itemsize, triton.cdiv(count, rows(count))
    read = count * (1 + residual) + programs * (1 + bias)
    return Traffic(read * row, count * (1 + (residual and store_sum)) * row)
