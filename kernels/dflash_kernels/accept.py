"""Accepted lengths, bonus tokens and what is committed, in one launch. Names as in
`gated_delta_fold`.

Letters in shapes: R requests, B block positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.core import acceptance


class Commit(NamedTuple):
    """What a verify step commits, in static buffers.

    Attributes:
        lengths: int64 `[R]`, committed tokens, 1 to B.
        bonus: int64 `[R]`, the last committed token.
        seq_lens: int64 `[R]`, committed tokens of the request after the step.
        keep: bool `[R, B]`, the block positions whose K/V is kept.
    """

    lengths: Tensor
    bonus: Tensor
    seq_lens: Tensor
    keep: Tensor


@triton.jit
def accept_kernel(
    p_block, p_target, p_seq_lens, p_lengths, p_bonus, p_new_lens, p_keep,
    s_block, s_target, B: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
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
    tl.store(p_new_lens + i_r, tl.load(p_seq_lens + i_r).to(tl.int64) + i_length)
    tl.store(p_keep + i_r * B + o_b, o_b < i_length, mask=o_b < B)


def accept(commit: Commit, block: Tensor, target_tokens: Tensor, seq_lens: Tensor) -> None:
    """As `core.acceptance.accept`, without a host synchronization.

    Args:
        commit: written; contiguous.
        block: int64 `[R, B]`, the bonus token of the last step, then the drafted tokens; unit
            stride over B, as `target_tokens`.
        target_tokens: int64 `[R, B]`, the target's token after each of them. They are the committed
            tokens as far as `lengths`.
        seq_lens: int `[R]`, committed tokens before the step. May be `commit.seq_lens`.
    """
    requests, size = block.shape
    if not requests:
        return
    accept_kernel[(requests,)](
        block, target_tokens, seq_lens, *commit, block.stride(0), target_tokens.stride(0),
        B=size, BLOCK_B=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip


def torch_accept(commit: Commit, block: Tensor, target_tokens: Tensor, seq_lens: Tensor) -> None:
    """The twin of `accept`."""
    accepted = acceptance.accept(block, target_tokens)
    commit.lengths.copy_(accepted.lengths)
    commit.bonus.copy_(accepted.bonus)
    commit.seq_lens.copy_(seq_lens + accepted.lengths)
    steps = torch.arange(block.shape[1], device=block.device)
    commit.keep.copy_(steps < accepted.lengths[:, None])


def make_commit(requests: int, block: int, device: torch.device | str) -> Commit:
    """Buffers for up to `requests` blocks."""
    lengths, bonus, seq_lens = torch.zeros(3, requests, dtype=torch.int64, device=device)
    keep = torch.zeros(requests, block, dtype=torch.bool, device=device)
    return Commit(lengths, bonus, seq_lens, keep)


def traffic(requests: int, block: int) -> Traffic:
    """Bytes of one launch, with int64 `seq_lens`."""
    return Traffic(requests * 16 * block, requests * (24 + block))
