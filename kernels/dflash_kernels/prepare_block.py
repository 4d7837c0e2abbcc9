"""Ids and positions of the blocks to draft, in one launch. Names as in `gated_delta_fold`.

Letters in shapes: R requests, B block positions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic

BLOCK = 256


# As for `accept_kernel`, whose results they are.
@triton.jit(do_not_specialize=["p_bonus", "p_seq_lens"])
def prepare_block_kernel(
    p_ids, p_positions, p_bonus, p_seq_lens, TOTAL, MASK, B: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per BLOCK block positions, over all requests."""
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_i, o_r, o_b = o_i < TOTAL, o_i // B, o_i % B
    b_ids = tl.load(p_bonus + o_r, mask=m_i & (o_b == 0), other=MASK)
    b_len = tl.load(p_seq_lens + o_r, mask=m_i, other=0)
    tl.store(p_ids + o_i, b_ids.to(tl.int64), mask=m_i)
    tl.store(p_positions + o_i, b_len.to(tl.int64) + o_b, mask=m_i)


def prepare_block(
    ids: Tensor, positions: Tensor, bonus: Tensor, seq_lens: Tensor, mask_id: int
) -> None:
    """Write the bonus token and B - 1 mask tokens, and their positions.

    Args:
        ids, positions: int64 `[R, B]`, contiguous, written.
        bonus: int `[R]`, each request's newest token.
        seq_lens: int `[R]`, its position.
        mask_id: the draft's mask token.
    """
    if not ids.numel():
        return
    prepare_block_kernel[(triton.cdiv(ids.numel(), BLOCK),)](
        ids, positions, bonus, seq_lens, ids.numel(), mask_id, B=ids.shape[1], BLOCK=BLOCK
    )


def traffic(requests: int, block: int) -> Traffic:
    """Bytes of one launch, with int64 `bonus` and `seq_lens`."""
    return Traffic(8 * requests * (1 + block), 16 * requests * block)
