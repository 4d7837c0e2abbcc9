"""The grouped dynamic convolution of DFlash2 inside of blocks, in one launch. Names as in
`gated_delta_fold`.

Letters in shapes: N tokens, of whole blocks; B block positions; K taps; E hidden size; C groups of
channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic

BLOCK = 1024


@triton.heuristics({"HAS_BIAS": lambda args: args["p_bias"] is not None})
@triton.jit
def convolve_kernel(
    p_out, p_x, p_bias, p_base, p_dynamic, s_x, s_dynamic, E, GROUPS,
    GROUP: tl.constexpr, B: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK channels."""
    i_n = tl.program_id(0).to(tl.int64)
    o_e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < E
    b_bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_k in range(K):
        m_k = m_e & (i_n % B >= i_k)
        b_x = tl.load(p_x + (i_n - i_k) * s_x + o_e, mask=m_k, other=0.0).to(tl.float32)
        b_kernel = tl.load(p_base + i_k * E + o_e, mask=m_k, other=0.0).to(tl.float32)
        p_group = p_dynamic + i_n * s_dynamic + i_k * GROUPS + o_e // GROUP
        b_kernel += tl.load(p_group, mask=m_k, other=0.0).to(tl.float32)
        b_sum += b_kernel * (b_x + b_bias)
    tl.store(p_out + i_n * E + o_e, b_sum.to(p_out.dtype.element_ty), mask=m_e)


def convolve(out: Tensor, x: Tensor, bias: Tensor | None, base: Tensor, dynamic: Tensor) -> None:
    """out = the sum over taps t of (x + bias), t positions before, times base[t] + dynamic[:, t].

    Args:
        out: `[N / B, B, E]`, contiguous, written; not x.
        x: `[N / B, B, E]`, rows of one stride.
        bias: `[E]`; None for none. What is before a block counts as zeros, without it.
        base: `[K, E]`, contiguous.
        dynamic: `[N / B, B, K, C]`, rows of one stride.
    """
    if not out.numel():
        return
    _, block, width = out.shape
    taps, groups = dynamic.shape[-2:]
    convolve_kernel[(out.numel() // width, triton.cdiv(width, BLOCK))](
        out, x, bias, base, dynamic, x.stride(-2), dynamic.stride(-3), width, groups,
        GROUP=width // groups, B=block, K=taps, BLOCK=BLOCK,
    )  # fmt: skip


def traffic(requests: int, block: int, width: int, taps: int, itemsize: int, bias: bool) -> Traffic:
    """Bytes of one launch; all tensors have elements of `itemsize` bytes."""
    row, reached = width * itemsize, sum(min(i + 1, taps) for i in range(block))
    return Traffic(requests * (3 * reached + bias * block) * row, requests * block * row)
