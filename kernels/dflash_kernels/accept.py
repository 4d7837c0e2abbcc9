"""Accepted lengths and bonus tokens, in one launch. Names as in `gated_delta_fold`.

Letters in shapes: R requests, B block positions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic

# Most blocks have no more positions: one compilation serves every verify width.
BLOCK = 64


# Otherwise a row of `[2, R]`, aligned or not by whether R is even, would choose the compilation and
# make one while serving; so would the width.
@triton.jit(do_not_specialize=["p_lengths", "p_bonus", "s_block", "s_target", "B"])
def accept_kernel(
    p_block, p_target, p_lengths, p_bonus, s_block, s_target, B, BLOCK_B: tl.constexpr
):
    """One program per request."""
    i_r = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK_B)
    # Position i holds the draft after it. The last position has none, so its length is B.
    m_draft = o_b < B - 1
    b_draft = tl.load(p_block + i_r * s_block + o_b + 1, mask=m_draft, other=0)
    b_target = tl.load(p_target + i_r * s_target + o_b, mask=m_draft, other=0)
    m_differs = (b_draft != b_target) & m_draft
    i_length = tl.min(tl.where(m_differs, o_b, B - 1)) + 1
    i_bonus = tl.load(p_target + i_r * s_target + i_length - 1)
    tl.store(p_lengths + i_r, i_length.to(tl.int64))
    tl.store(p_bonus + i_r, i_bonus)


def accept(lengths: Tensor, bonus: Tensor, block: Tensor, target_tokens: Tensor) -> None:
    """Write the `lengths` and `bonus` tokens of its twin, `drafting.acceptance.accept`, without a
    host synchronization. `block` and `target_tokens` have unit stride over B."""
    requests, size = block.shape
    if not requests:
        return
    accept_kernel[(requests,)](
        block, target_tokens, lengths, bonus, block.stride(0), target_tokens.stride(0),
        size, BLOCK_B=max(BLOCK, triton.next_power_of_2(size)), num_warps=1,
    )  # fmt: skip


def traffic(requests: int, block: int) -> Traffic:
    """Bytes of one launch."""
    return Traffic(requests * (16 * (block - 1) + 8), requests * 16)
