"""silu(gate) * up of an MLP in one launch. Names as in `gated_delta_fold`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic

BLOCK = 1024


@triton.jit
def silu_mul_kernel(p_out, p_x, s_out, s_x, WIDTH, BLOCK: tl.constexpr):
    """One program per token and BLOCK columns."""
    i_n = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < WIDTH
    p_x += i_n * s_x + o_i
    b_gate = tl.load(p_x, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + WIDTH, mask=m_i, other=0.0)
    # silu is rounded where torch rounds it.
    b_silu = (b_gate / (1.0 + tl.exp(-b_gate))).to(b_up.dtype).to(tl.float32)
    b_out = b_silu * b_up.to(tl.float32)
    tl.store(p_out + i_n * s_out + o_i, b_out.to(p_out.dtype.element_ty), mask=m_i)


def silu_mul(out: Tensor, x: Tensor) -> None:
    """out = silu(x[:, :I]) * x[:, I:].

    Args:
        out: `[N, I]`, written; unit stride over I, as x.
        x: `[N, 2 I]`, gate and up side by side.
    """
    count, width = out.shape
    if not count:
        return
    silu_mul_kernel[(count, triton.cdiv(width, BLOCK))](
        out, x, out.stride(0), x.stride(0), width, BLOCK=BLOCK
    )


def traffic(count: int, width: int, itemsize: int) -> Traffic:
    """Bytes of one launch on N = `count` tokens of I = `width`."""
    return Traffic(2 * count * width * itemsize, count * width * itemsize)
