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

# Tokens and groups of channels of a program.
ROWS, GROUPS = 8, 16


@triton.heuristics({"HAS_BIAS": lambda args: args["p_bias"] is not None})
@triton.jit(do_not_specialize=["N"])
def convolve_kernel(
    p_out, p_x, p_bias, p_base, p_dynamic, s_x, s_dynamic, N, E, C,
    GROUP: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per ROWS tokens and GROUPS groups of channels, in tiles [ROWS, GROUPS, GROUP]."""
    o_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    o_c = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :, None]
    o_g = tl.arange(0, BLOCK_G)[None, None, :]
    o_e = o_c * GROUP + o_g
    m_n, m_c = o_n < N, o_c < C
    m_e = m_c & (o_g < GROUP)
    b_bias = tl.zeros([1, GROUPS, BLOCK_G], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    b_sum = tl.zeros([ROWS, GROUPS, BLOCK_G], tl.float32)
    for i_k in range(K):
        m_k = m_n & (o_n % B >= i_k)
        b_x = tl.load(p_x + (o_n - i_k) * s_x + o_e, mask=m_k & m_e, other=0.0).to(tl.float32)
        b_base = tl.load(p_base + i_k * E + o_e, mask=m_e, other=0.0).to(tl.float32)
        p_group = p_dynamic + o_n * s_dynamic + i_k * C + o_c
        b_kernel = b_base + tl.load(p_group, mask=m_k & m_c, other=0.0).to(tl.float32)
        b_sum += tl.where(m_k, b_kernel * (b_x + b_bias), 0.0)
    tl.store(p_out + o_n * E + o_e, b_sum.to(p_out.dtype.element_ty), mask=m_n & m_e)


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
    count, size = out.numel() // width, width // groups
    convolve_kernel[(triton.cdiv(count, ROWS), triton.cdiv(groups, GROUPS))](
        out, x, bias, base, dynamic, x.stride(-2), dynamic.stride(-3), count, width, groups,
        GROUP=size, B=block, K=taps, ROWS=ROWS, GROUPS=GROUPS,
        BLOCK_G=triton.next_power_of_2(size),
    )  # fmt: skip


def traffic(
    requests: int, block: int, width: int, taps: int, groups: int, itemsize: int, bias: bool
) -> Traffic:
    """Bytes of one launch; all tensors have elements of `itemsize` bytes."""
    count, reached = requests * block, requests * sum(min(i + 1, taps) for i in range(block))
    read = reached * (width + groups) + triton.cdiv(count, ROWS) * (taps + bias) * width
    return Traffic(read * itemsize, count * width * itemsize)
