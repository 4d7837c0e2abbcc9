"""Kernels that choose between the draft's and looked-up drafts, and learn from the outcome: a
launch each. Names as in `gated_delta_fold`.

Letters in shapes: R requests; W positions of a step; P drafts of a step, at most; M classes of
matches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.draft_source import (
    CLASSES,
    DECAY,
    PRIOR_STEPS,
    DraftsBySource,
    DraftSource,
)

# Requests of a tile.
BLOCK_R = 16


# What a start-up check cannot know is not specialized, or a first step would compile.
@triton.jit(
    do_not_specialize=["s_drafted", "s_likeliest", "s_followed", "R", "W", "DRAFTED", "VOCABULARY"]
)
def choose_source_kernel(
    p_block, p_tokens, p_classes, p_looks_up,
    p_drafted, p_likeliest, p_lengths, p_followed, p_totals, p_class_of_length,
    s_drafted, s_likeliest, s_followed, R, W, DRAFTED, VOCABULARY,
    P: tl.constexpr, CLASSES: tl.constexpr, PRIOR_STEPS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program per request. DRAFTED: columns of `p_drafted`."""
    i_r = tl.program_id(0).to(tl.int64)
    p_drafted += i_r * s_drafted
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < W - 1
    b_draft = tl.load(p_drafted + 1 + o_p, mask=m_p & (o_p < DRAFTED - 1), other=0)
    b_lookup = tl.load(p_followed + i_r * s_followed + o_p, mask=m_p, other=0)
    is_token = (b_lookup >= 0) & (b_lookup < VOCABULARY)
    i_likeliest = tl.load(p_likeliest + i_r * s_likeliest + 1)
    begins_unlike = tl.sum(tl.where((o_p == 0) & is_token & (b_lookup != i_likeliest), 1, 0)) > 0
    b_lookup = tl.where(is_token, b_lookup, b_draft)
    i_class = tl.load(p_class_of_length + tl.load(p_lengths + i_r))
    is_match = i_class > 0
    i_class += tl.where(is_match & ~begins_unlike, 1, 0)

    # Of each source: how often it was reached, and how often right.
    s_source: tl.constexpr = (CLASSES + 1) * P
    p_draft, p_lookup = p_totals + o_p, p_totals + s_source + i_class * P + o_p
    s_right: tl.constexpr = 2 * s_source
    b_all = tl.load(p_draft + CLASSES * P, mask=m_p, other=1)
    b_all_right = tl.load(p_draft + s_right + CLASSES * P, mask=m_p, other=0)
    b_reached = tl.load(p_draft + i_class * P, mask=m_p, other=1)
    b_right = tl.load(p_draft + s_right + i_class * P, mask=m_p, other=0)
    b_share = (b_right + PRIOR_STEPS * b_all_right / b_all) / (b_reached + PRIOR_STEPS)
    b_reached = tl.load(p_lookup, mask=m_p, other=1)
    b_lookup_share = tl.load(p_lookup + s_right, mask=m_p, other=0) / b_reached
    expected = tl.sum(tl.cumprod(b_share, 0))
    looks_up = is_match & (tl.sum(tl.cumprod(b_lookup_share, 0)) > expected)

    p_block += i_r * W
    tl.store(p_block, tl.load(p_drafted))
    tl.store(p_block + 1 + o_p, tl.where(looks_up, b_lookup, b_draft), mask=m_p)
    tl.store(p_tokens + i_r * (W - 1) + o_p, b_draft, mask=m_p)
    tl.store(p_tokens + (R + i_r) * (W - 1) + o_p, b_lookup, mask=m_p)
    tl.store(p_classes + i_r, i_class)
    tl.store(p_looks_up + i_r, looks_up)


def choose_source(
    source: DraftSource,
    drafted: Tensor,
    likeliest: Tensor,
    lengths: Tensor,
    followed: Tensor,
    width: int,
) -> tuple[Tensor, DraftsBySource]:
    """See its twin in `drafting.draft_source`, whose arguments and results these are.

    Raises:
        ValueError: rows of `drafted` or `likeliest` are not dense.
    """
    if drafted.stride(1) != 1 or likeliest.stride(1) != 1:
        strides = f"{drafted.stride()} and {likeliest.stride()}"
        raise ValueError(f"strides {strides} of drafts; rows have to be dense")
    requests, positions = len(drafted), source.totals.shape[-1]
    block = drafted.new_empty(requests, width)
    tokens, classes = drafted.new_empty(2, requests, width - 1), drafted.new_empty(requests)
    looks_up = torch.empty(requests, dtype=torch.bool, device=drafted.device)
    if requests:
        choose_source_kernel[(requests,)](
            block, tokens, classes, looks_up,
            drafted, likeliest, lengths, followed, source.totals, source.class_of_length,
            drafted.stride(0), likeliest.stride(0), followed.stride(0), requests, width,
            drafted.shape[1], source.vocab_size, P=positions, CLASSES=CLASSES,
            PRIOR_STEPS=PRIOR_STEPS, BLOCK_P=triton.next_power_of_2(positions), num_warps=1,
        )  # fmt: skip
    return block, DraftsBySource(tokens, classes, looks_up)


@triton.jit(do_not_specialize=["p_counts", "p_lengths", "s_target", "R", "W"])
def learn_source_kernel(
    p_totals, p_counts, p_tokens, p_classes, p_looks_up, p_lengths, p_target, s_target, R, W,
    P: tl.constexpr, CLASSES: tl.constexpr, DECAY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program per class, and one for that of all steps, which also counts the steps."""
    i_class = tl.program_id(0)
    is_all = i_class == CLASSES
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < W - 1
    for i_source in tl.static_range(2):
        b_reached, b_right = tl.zeros((BLOCK_P,), tl.float32), tl.zeros((BLOCK_P,), tl.float32)
        i_steps, i_taken = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        for i_first in range(0, R, BLOCK_R):
            o_r = (i_first + tl.arange(0, BLOCK_R)).to(tl.int64)
            m_r = o_r < R
            b_length = tl.load(p_lengths + o_r, mask=m_r, other=0)
            m_class = m_r & (is_all | (tl.load(p_classes + o_r, mask=m_r, other=0) == i_class))
            m = m_class[:, None] & m_p[None, :]
            p_row = p_tokens + (i_source * R + o_r[:, None]) * (W - 1)
            b_token = tl.load(p_row + o_p[None, :], mask=m, other=0)
            p_row = p_target + o_r[:, None] * s_target
            b_target = tl.load(p_row + o_p[None, :], mask=m, other=0)
            # A draft was right or wrong where all before it were right.
            b_wrong = tl.min(tl.where((b_token != b_target) & m, o_p[None, :], BLOCK_P), 1)
            m &= o_p[None, :] < b_length[:, None]
            b_reached += tl.sum((m & (o_p[None, :] <= b_wrong[:, None])).to(tl.float32), 0)
            b_right += tl.sum((m & (o_p[None, :] < b_wrong[:, None])).to(tl.float32), 0)
            if is_all:
                m_r &= tl.load(p_looks_up + o_r, mask=m_r, other=0).to(tl.int32) == i_source
                i_steps += tl.sum(m_r.to(tl.int64))
                i_taken += tl.sum(tl.where(m_r, b_length - 1, 0))
        p_reached = p_totals + (i_source * (CLASSES + 1) + i_class) * P + o_p
        p_right = p_reached + 2 * (CLASSES + 1) * P
        b_decay = tl.where(b_reached > 0, DECAY, 1.0)
        tl.store(p_reached, tl.load(p_reached, mask=m_p) * b_decay + b_reached, mask=m_p)
        tl.store(p_right, tl.load(p_right, mask=m_p) * b_decay + b_right, mask=m_p)
        if is_all:
            p_steps = p_counts + 2 * i_source
            tl.store(p_steps, tl.load(p_steps) + i_steps)
            tl.store(p_steps + 1, tl.load(p_steps + 1) + i_taken)


def learn_source(source: DraftSource, by_source: DraftsBySource, accepted: Accepted) -> None:
    """See its twin in `drafting.draft_source`, whose arguments these are. Rows are dense, as
    `accept` makes them."""
    tokens, classes, looks_up = by_source
    positions = source.totals.shape[-1]
    if not len(classes):
        return
    learn_source_kernel[(CLASSES + 1,)](
        source.totals, source.counts, tokens, classes, looks_up,
        accepted.lengths, accepted.tokens, accepted.tokens.stride(0), len(classes),
        tokens.shape[2] + 1, P=positions, CLASSES=CLASSES, DECAY=DECAY,
        BLOCK_R=BLOCK_R, BLOCK_P=triton.next_power_of_2(positions),
    )  # fmt: skip


def choose_traffic(requests: int, width: int, drafted: int) -> Traffic:
    """Bytes of a choice.

    Args:
        drafted: tokens of the draft's block, the bonus token included.
    """
    drafts = width - 1
    read = 8 * (4 + drafts + min(drafts, drafted - 1)) + 4 * 6 * drafts
    return Traffic(requests * read, requests * (8 * (2 + 3 * drafts) + 1))


def learn_traffic(requests: int, drafts: int) -> Traffic:
    """Bytes of taking in an outcome of so many drafts per request: they are read for the class of
    the request, and for that of all steps."""
    classes = CLASSES + 1
    totals = 4 * 4 * classes * drafts
    of_sources = 2 * requests * (16 * classes + 2 * 16 * drafts + 1)
    return Traffic(of_sources + totals + 32, totals + 32)
