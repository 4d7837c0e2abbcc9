"""A token of each row, sampled from those that top-k, top-p and min-p keep. The logits are read
once, again for rows that no filter touches, and twice for rows whose filters keep more than
`MOST_CANDIDATES` tokens. Names as in `gated_delta_fold`.

A sample is the token with the largest noisy score among those that are kept, and a token is kept or
not by what precedes it in the order of logits. So a row that keeps many takes the largest score of
all tokens; if that token is not kept, the largest of the tokens before it; and so on. Most take the
first: it is a sample of the whole distribution, most of which is kept. A row that no filter touches
is sampled as without filters, by the same kernel.

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
    left_over,
    load_proposal,
    total_weight,
)
from dflash_kernels.sample_whole import (
    CHUNK,
    OPEN,
    WHOLE,
    judge_draft,
    merge_splits,
    proposal_shape,
    proposal_sizes,
    scan,
)
from dflash_kernels.traffic import Traffic
from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES
from sglang_dflash.drafting.noise import BlockNoise, Proposal, SampleFilters

# Columns of a turn, and those of a row that is searched anew: one program goes over all of it.
BLOCK, WIDE_BLOCK = 1024, 2048
_OPEN, _WHOLE = tl.constexpr(OPEN), tl.constexpr(WHOLE)


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
    p_out, p_values, p_ids, p_logits, p_maxima, p_sums, p_seeds, p_temperatures, p_seq_lens,
    p_top_ks, p_top_ps, p_min_ps, p_block, p_is_drawn, p_candidates, p_scores, s_logits, V,
    s_block, POSITIONS, DRAFTS, PARTS, HAS_PROPOSAL: tl.constexpr, TOP: tl.constexpr,
    BLOCK_TOP: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """One program per row. No token where others than the TOP likeliest are kept."""
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
    i_state = tl.full((), _WHOLE, tl.int32)
    if HAS_PROPOSAL:
        i_draft, is_drawn, b_q_ids, b_q = load_proposal(
            p_block, p_is_drawn, p_candidates, p_scores, s_block, i_r, i_p, POSITIONS, DRAFTS, K,
            BLOCK_Q,
        )  # fmt: skip
        i_state = judge_draft(
            p_logits + i_n * s_logits, i_seed, i_position, i_scale, i_max, i_total, i_draft,
            is_drawn, b_q_ids, b_q,
        )  # fmt: skip
        if is_drawn:
            b_weights = tl.where(b_kept, b_weights, 0.0)
            b_p = b_weights / tl.sum(b_weights)
            b_same = b_ids[:, None] == b_q_ids[None, :]
            b_q_same = tl.sum(tl.where(b_same, b_q[None, :], 0.0), 1)
            is_draft = m_k & (b_ids == i_draft)
            b_left = left_over(b_p, b_q_same, is_draft)
            b_hash = end_hash(begin_hash_anew(i_seed, i_position), b_ids)
            b_scores = tl.where(b_kept, tl.log(b_left) + gumbel(b_hash), float("-inf"))
            i_p_draft = tl.sum(tl.where(is_draft, b_p, 0.0))
            i_q_draft = tl.sum(tl.where(b_q_ids == i_draft, b_q, 0.0))
            if is_accepted(i_seed, i_position, i_p_draft, i_q_draft):
                b_scores = tl.where(is_draft, float("inf"), b_scores)
    _, i_best = first_largest(b_scores, o_k)
    i_kept = tl.sum(b_kept.to(tl.int32))
    i_top_k = tl.load(p_top_ks + i_r)
    is_open = (i_kept == TOP) & (V > TOP) & (i_top_k > TOP)
    is_touched = (i_top_k < V) | (tl.load(p_top_ps + i_r) < 1) | (tl.load(p_min_ps + i_r) > 0)
    i_state = tl.where(is_touched, _OPEN, i_state).to(tl.int64)
    tl.store(p_out + i_n, tl.where(is_open, i_state, tl.load(p_ids + i_n * TOP + i_best)))


@triton.jit
def precede(b_x, o_v, i_x, i_v):
    """Return whether tokens come before token `i_v` with logit `i_x`: the likelier ones do, and of
    equally likely ones the lower ids."""
    return (b_x > i_x) | ((b_x == i_x) & (o_v < i_v))


@triton.jit
def weight_before(p_row, i_first, i_x, i_v, i_max, i_scale, V, COUNT, BLOCK: tl.constexpr):
    """The number of tokens that come before one, and their weight, among COUNT columns."""
    b_likelier, b_rank = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for i in range(0, COUNT, BLOCK):
        o_v = i_first + i + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        m_before = precede(b_x, o_v, i_x, i_v)
        b_rank += m_before.to(tl.int32)
        b_likelier += tl.where(m_before, tl.exp((b_x - i_max) * i_scale), 0.0)
    return tl.sum(b_rank), tl.sum(b_likelier)


@triton.jit(do_not_specialize=["p_ids", "p_likelier", "p_sums", "POSITIONS"])
def rank_samples_kernel(
    p_ranks, p_likelier, p_best, p_ids, p_out, p_logits, p_maxima, p_sums, p_temperatures, s_logits,
    V, POSITIONS, PARTS, SPLITS, BLOCK_PARTS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and CHUNK columns; of a row that is not OPEN it does nothing."""
    i_n, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(p_out + i_n) == _OPEN:
        i_best, i_token = merge_splits(p_best, p_ids, i_n, SPLITS, BLOCK_SPLITS)
        if i_best < float("inf"):
            p_row = p_logits + i_n * s_logits
            i_scale = inverse_temperature(p_temperatures + i_n // POSITIONS)
            i_max, _ = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
            i_x = tl.load(p_row + i_token).to(tl.float32)
            i_rank, i_likelier = weight_before(
                p_row, i_split * CHUNK, i_x, i_token, i_max, i_scale, V, CHUNK, BLOCK
            )
            tl.store(p_ranks + i_n * SPLITS + i_split, i_rank)
            tl.store(p_likelier + i_n * SPLITS + i_split, i_likelier)


@triton.jit(do_not_specialize=["p_ids", "p_likelier", "p_sums", "POSITIONS"])
def sample_others_kernel(
    p_out, p_ranks, p_likelier, p_best, p_ids, p_logits, p_maxima, p_sums, p_seeds, p_temperatures,
    p_seq_lens, p_top_ks, p_top_ps, p_min_ps, s_logits, V, POSITIONS, PARTS, SPLITS,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row. It looks at the logits only if the filters do not keep what has the
    largest score."""
    i_n = tl.program_id(0).to(tl.int64)
    i_best, i_last = merge_splits(p_best, p_ids, i_n, SPLITS, BLOCK_SPLITS)
    i_token = i_last
    # Behind a rejected draft there is nothing to do.
    if (tl.load(p_out + i_n) == _OPEN) & (i_best < float("inf")):
        i_r, p_row, o_s = i_n // POSITIONS, p_logits + i_n * s_logits, tl.arange(0, BLOCK_SPLITS)
        i_scale = inverse_temperature(p_temperatures + i_r)
        i_max, i_total = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
        i_position = tl.load(p_seq_lens + i_r) + i_n % POSITIONS
        i_hash = begin_hash(tl.load(p_seeds + i_r), i_position)
        m_s, i_last_x = o_s < SPLITS, tl.load(p_row + i_last).to(tl.float32)
        i_rank = tl.sum(tl.load(p_ranks + i_n * SPLITS + o_s, mask=m_s, other=0))
        i_likelier = tl.sum(tl.load(p_likelier + i_n * SPLITS + o_s, mask=m_s, other=0.0))
        i_weight = tl.exp((i_last_x - i_max) * i_scale)
        is_kept = are_kept(i_rank, i_likelier, i_weight, p_top_ks, p_top_ps, p_min_ps, i_r, i_total)
        while not is_kept:
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
            i_rank, i_likelier = weight_before(
                p_row, 0, i_last_x, i_last, i_max, i_scale, V, V, BLOCK
            )
            i_weight = tl.exp((i_last_x - i_max) * i_scale)
            is_kept = are_kept(
                i_rank, i_likelier, i_weight, p_top_ks, p_top_ps, p_min_ps, i_r, i_total
            )
        i_token = i_last
    tl.store(p_out + i_n, i_token.to(tl.int64))


def sample_filtered(
    out: Tensor,
    logits: Tensor,
    noise: BlockNoise,
    filters: SampleFilters,
    proposal: Proposal | None,
) -> None:
    """Write what `TorchOps.sample` returns to `out`, in six launches.

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
    summed = Sums(maxima, sums, noise.temperatures)
    candidates(values, ids, logits, summed)
    rows = (maxima, sums, *noise, *filters)
    positions, sizes = count // len(noise.seeds), {"BLOCK_PARTS": triton.next_power_of_2(parts)}
    sample_candidates_kernel[(count,)](
        out, values, ids, logits, *rows, *(proposal or (None, None, None, None)), logits.stride(0),
        width, *proposal_shape(proposal, positions), parts, TOP=k,
        BLOCK_TOP=triton.next_power_of_2(k), **proposal_sizes(proposal), **sizes,
        num_warps=1 if proposal is None else 4,
    )  # fmt: skip
    best, best_ids = scan(logits, noise, summed, proposal, out)
    splits = best.shape[1]
    ranks, likelier = torch.empty(2, count, splits, dtype=torch.float32, device=device)
    tries = (ranks.view(torch.int32), likelier, best, best_ids)
    sizes["BLOCK_SPLITS"] = triton.next_power_of_2(splits)
    rank_samples_kernel[(count, splits)](
        *tries, out, logits, maxima, sums, noise.temperatures, logits.stride(0), width, positions,
        parts, splits, CHUNK=CHUNK, BLOCK=BLOCK, **sizes,
    )  # fmt: skip
    sample_others_kernel[(count,)](
        out, *tries, logits, *rows, logits.stride(0), width, positions, parts, splits, **sizes,
        BLOCK=WIDE_BLOCK, num_warps=16,
    )  # fmt: skip


def traffic(values: Tensor, width: int) -> Traffic:
    """Bytes of the last four launches without a proposal, of V columns, if the candidates `[N, K]`
    of every row are enough."""
    (count, k), splits = values.shape, triton.cdiv(width, CHUNK)
    read = k * (values.element_size() + 8) + 8 * part_count(width) + 24 * splits + 60
    return Traffic(count * read, count * (8 * splits + 16))
