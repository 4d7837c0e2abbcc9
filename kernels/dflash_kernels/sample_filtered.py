"""A token of each row, sampled from those that top-k, top-p and min-p keep. The logits are read
once, and again for rows whose filters keep more than `MOST_CANDIDATES` tokens. Names as in
`gated_delta_fold`.

A sample is the token with the largest noisy score among those that are kept, and a token is kept or
not by what precedes it in the order of logits. So a row that keeps many takes the largest score of
all tokens; if that token is not kept, the largest of the tokens before it; and so on. Most take the
first: it is a sample of the whole distribution, most of which is kept.

Letters in shapes: R requests; P positions; N = R P rows; V tokens; K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.candidates import Sums, candidates, part_count
from dflash_kernels.noise import (
    begin_hash,
    begin_hash_anew,
    end_hash,
    first_largest,
    gumbel,
    inverse_temperature,
    is_accepted,
    load_proposal,
    total_weight,
)
from dflash_kernels.sample_whole import proposal_sizes
from dflash_kernels.traffic import Traffic
from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES
from sglang_dflash.drafting.noise import BlockNoise, Proposal, SampleFilters

# Columns of a turn.
BLOCK = 1024


@triton.jit
def are_kept(b_rank, b_likelier, b_weight, p_top_ks, p_top_ps, p_min_ps, i_r, i_total):
    """Return whether the filters keep tokens of these ranks and weights; the likeliest token has
    weight 1. `b_likelier`: the sum of the weights of the tokens before them."""
    i_top_p = tl.load(p_top_ps + i_r)
    i_most = tl.where(i_top_p < 1, i_top_p * i_total, float("inf"))
    return (
        (b_rank < tl.load(p_top_ks + i_r))
        & (b_likelier <= i_most)
        & (b_weight >= tl.load(p_min_ps + i_r))
    )


@triton.heuristics({"HAS_PROPOSAL": lambda args: args["p_block"] is not None})
@triton.jit(do_not_specialize=["p_sums", "s_block", "POSITIONS", "DRAFTS"])
def sample_candidates_kernel(
    p_out, p_values, p_ids, p_maxima, p_sums, p_seeds, p_temperatures, p_seq_lens, p_top_ks,
    p_top_ps, p_min_ps, p_block, p_is_drawn, p_candidates, p_scores, s_block, V, POSITIONS, DRAFTS,
    PARTS, HAS_PROPOSAL: tl.constexpr, TOP: tl.constexpr, BLOCK_TOP: tl.constexpr,
    K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """One program per row. -1 where tokens beyond the TOP likeliest are kept."""
    i_n = tl.program_id(0).to(tl.int64)
    i_r, i_p, o_k = i_n // POSITIONS, i_n % POSITIONS, tl.arange(0, BLOCK_TOP)
    m_k = o_k < TOP
    i_scale = inverse_temperature(p_temperatures + i_r)
    i_max, i_total = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
    b_values = tl.load(p_values + i_n * TOP + o_k, mask=m_k, other=float("-inf")).to(tl.float32)
    b_ids = tl.load(p_ids + i_n * TOP + o_k, mask=m_k, other=0)
    b_weights = tl.exp((b_values - i_max) * i_scale)
    b_likelier = tl.cumsum(b_weights) - b_weights
    b_kept = are_kept(o_k, b_likelier, b_weights, p_top_ks, p_top_ps, p_min_ps, i_r, i_total)
    b_kept &= m_k
    i_seed, i_position = tl.load(p_seeds + i_r), tl.load(p_seq_lens + i_r) + i_p
    b_hash = end_hash(begin_hash(i_seed, i_position), b_ids)
    b_scores = tl.where(b_kept, b_values * i_scale + gumbel(b_hash), float("-inf"))
    if HAS_PROPOSAL:
        i_draft, is_drawn, b_q_ids, b_q = load_proposal(
            p_block, p_is_drawn, p_candidates, p_scores, s_block, i_r, i_p, POSITIONS, DRAFTS, K,
            BLOCK_Q,
        )  # fmt: skip
        if is_drawn:
            b_weights = tl.where(b_kept, b_weights, 0.0)
            b_p = b_weights / tl.sum(b_weights)
            b_same = b_ids[:, None] == b_q_ids[None, :]
            b_left = tl.maximum(b_p - tl.sum(tl.where(b_same, b_q[None, :], 0.0), 1), 0.0)
            b_hash = end_hash(begin_hash_anew(i_seed, i_position), b_ids)
            b_scores = tl.where(b_kept, tl.log(b_left) + gumbel(b_hash), float("-inf"))
            is_draft = m_k & (b_ids == i_draft)
            i_p_draft = tl.sum(tl.where(is_draft, b_p, 0.0))
            i_q_draft = tl.sum(tl.where(b_q_ids == i_draft, b_q, 0.0))
            # By rounding, nothing may be left.
            is_empty = tl.max(b_scores) == float("-inf")
            if is_empty | is_accepted(i_seed, i_position, i_p_draft, i_q_draft):
                b_scores = tl.where(is_draft, float("inf"), b_scores)
    _, i_best = first_largest(b_scores, o_k)
    i_kept = tl.sum(b_kept.to(tl.int32))
    is_open = (i_kept == TOP) & (V > TOP) & (tl.load(p_top_ks + i_r) > TOP)
    tl.store(p_out + i_n, tl.where(is_open, -1, tl.load(p_ids + i_n * TOP + i_best)))


@triton.jit
def precede(b_x, o_v, i_x, i_v):
    """Return whether tokens come before token `i_v` with logit `i_x`: the likelier ones do, and of
    equally likely ones the lower ids."""
    return (b_x > i_x) | ((b_x == i_x) & (o_v < i_v))


@triton.jit(do_not_specialize=["p_sums", "POSITIONS"])
def sample_others_kernel(
    p_out, p_logits, p_maxima, p_sums, p_seeds, p_temperatures, p_seq_lens, p_top_ks, p_top_ps,
    p_min_ps, s_logits, V, POSITIONS, PARTS, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row; of a row that has its token it does nothing."""
    i_n = tl.program_id(0).to(tl.int64)
    i_token = tl.load(p_out + i_n).to(tl.int32)
    if i_token < 0:
        i_r, p_row = i_n // POSITIONS, p_logits + i_n * s_logits
        i_scale = inverse_temperature(p_temperatures + i_r)
        i_max, i_total = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
        i_position = tl.load(p_seq_lens + i_r) + i_n % POSITIONS
        i_hash = begin_hash(tl.load(p_seeds + i_r), i_position)
        # Every token comes before this one.
        i_last, i_last_x = V, tl.full((), float("-inf"), tl.float32)
        while i_token < 0:
            b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
            b_ids = tl.zeros((BLOCK,), tl.int32)
            for i in range(0, V, BLOCK):
                o_v = i + tl.arange(0, BLOCK)
                b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
                b_score = b_x * i_scale + gumbel(end_hash(i_hash, o_v))
                b_score = tl.where(precede(b_x, o_v, i_last_x, i_last), b_score, float("-inf"))
                b_ids = tl.where(b_score > b_best, o_v, b_ids)
                b_best = tl.maximum(b_score, b_best)
            _, i_last = first_largest(b_best, b_ids)
            i_last_x = tl.load(p_row + i_last).to(tl.float32)
            b_likelier, b_rank = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
            for i in range(0, V, BLOCK):
                o_v = i + tl.arange(0, BLOCK)
                b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
                m_before = precede(b_x, o_v, i_last_x, i_last)
                b_rank += m_before.to(tl.int32)
                b_likelier += tl.where(m_before, tl.exp((b_x - i_max) * i_scale), 0.0)
            i_weight = tl.exp((i_last_x - i_max) * i_scale)
            is_kept = are_kept(
                tl.sum(b_rank), tl.sum(b_likelier), i_weight, p_top_ks, p_top_ps, p_min_ps, i_r,
                i_total,
            )  # fmt: skip
            i_token = tl.where(is_kept, i_last, -1)
        tl.store(p_out + i_n, i_token.to(tl.int64))


def sample_filtered(
    out: Tensor,
    logits: Tensor,
    noise: BlockNoise,
    filters: SampleFilters,
    proposal: Proposal | None,
) -> None:
    """Write what `TorchOps.sample` returns to `out`, in four launches.

    Args:
        out: int64 `[N]`, written.
        logits: `[N, V]`, rows of any stride.
        noise, filters, proposal: see there.
    """
    count, width = logits.shape
    if not count:
        return
    k, parts, device = min(MOST_CANDIDATES, width), part_count(width), logits.device
    values = logits.new_empty(count, k)
    ids = torch.empty(count, k, dtype=torch.int64, device=device)
    maxima, sums = torch.empty(2, count, parts, dtype=torch.float32, device=device)
    candidates(values, ids, logits, Sums(maxima, sums, noise.temperatures))
    rows = (maxima, sums, *noise, *filters)
    positions, sizes = count // len(noise.seeds), {"BLOCK_PARTS": triton.next_power_of_2(parts)}
    sample_candidates_kernel[(count,)](
        out, values, ids, *rows, *(proposal or (None, None, None, None)),
        0 if proposal is None else proposal.block.stride(0), width, positions,
        0 if proposal is None else proposal.candidates.shape[1], parts, TOP=k,
        BLOCK_TOP=triton.next_power_of_2(k), **proposal_sizes(proposal), **sizes,
        num_warps=1 if proposal is None else 4,
    )  # fmt: skip
    sample_others_kernel[(count,)](
        out, logits, *rows, logits.stride(0), width, positions, parts, BLOCK=BLOCK, **sizes
    )


def traffic(values: Tensor, parts: int) -> Traffic:
    """Bytes of the last two launches, if the candidates `[N, K]` of every row are enough."""
    count, k = values.shape
    of_request = 3 * 8 + 4 * 4
    read = k * (values.element_size() + 8) + 16 + 8 * parts + of_request
    return Traffic(count * read, 8 * count)
