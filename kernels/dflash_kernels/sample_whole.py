"""A token of each row, sampled from the whole vocabulary. Names as in `gated_delta_fold`.

After a draft that was drawn it is the draft, or a token of what its distribution lacks: the logits
are read once more for that, but not of accepted drafts.

Letters in shapes: R requests; W positions of a step; N = R W rows; V tokens; K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.candidates import Sums, part_count, sum_parts
from dflash_kernels.noise import (
    begin_hash,
    begin_hash_anew,
    end_hash,
    first_largest,
    gumbel,
    is_accepted,
    load_proposal,
    total_weight,
)
from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.noise import BlockNoise, Proposal

# Columns of a program, and of one of its turns.
CHUNK, BLOCK = 8192, 1024


@triton.jit
def best_candidate(
    p_row, b_ids, b_q, i_max, i_total, i_scale, i_hash, i_split, CHUNK: tl.constexpr
):  # fmt: skip
    """The largest score of the candidates in a program's columns, and its token: the score of the
    part of their probabilities that the draft's leave, in the unit of the other scores."""
    b_x = tl.load(p_row + b_ids, mask=b_ids >= 0, other=float("-inf")).to(tl.float32)
    b_left = tl.exp((b_x - i_max) * i_scale) / i_total - b_q
    b_scores = tl.log(tl.maximum(b_left, 0.0)) + tl.log(i_total) + i_max * i_scale
    b_scores += gumbel(end_hash(i_hash, b_ids))
    is_here = (b_ids >= 0) & (b_ids // CHUNK == i_split)
    return first_largest(tl.where(is_here, b_scores, float("-inf")), b_ids)


# Batches and blocks of any size share a compilation: the number of rows decides where the parts'
# ids begin.
@triton.heuristics({"HAS_PROPOSAL": lambda args: args["p_block"] is not None})
@triton.jit(do_not_specialize=["p_ids", "p_sums", "s_block", "POSITIONS", "DRAFTS"])
def sample_whole_kernel(
    p_best, p_ids, p_logits, p_seeds, p_temperatures, p_seq_lens, p_maxima, p_sums, p_block,
    p_is_drawn, p_candidates, p_scores, s_logits, s_block, V, POSITIONS, DRAFTS, PARTS,
    HAS_PROPOSAL: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and CHUNK columns."""
    i_n, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_r, i_p = i_n // POSITIONS, i_n % POSITIONS
    p_row = p_logits + i_n * s_logits
    i_temperature = tl.load(p_temperatures + i_r)
    is_sampled = i_temperature > 0
    # A request without noise divides by 1.
    i_scale = 1.0 / tl.where(is_sampled, i_temperature, 1.0)
    i_seed, i_position = tl.load(p_seeds + i_r), tl.load(p_seq_lens + i_r) + i_p
    i_hash = begin_hash(i_seed, i_position)
    b_best, b_ids = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    is_drawn = is_sampled != is_sampled
    is_done, i_best, i_id = is_drawn, tl.full((), float("inf"), tl.float32), tl.zeros((), tl.int32)
    if HAS_PROPOSAL:
        i_draft, is_drawn, b_q_ids, b_q = load_proposal(
            p_block, p_is_drawn, p_candidates, p_scores, s_block, i_r, i_p, POSITIONS, DRAFTS, K,
            BLOCK_Q,
        )  # fmt: skip
        i_max, i_total = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
        i_x = tl.load(p_row + i_draft).to(tl.float32)
        i_p_draft = tl.exp((i_x - i_max) * i_scale) / i_total
        i_q_draft = tl.sum(tl.where(b_q_ids == i_draft, b_q, 0.0))
        is_done = is_drawn & is_accepted(i_seed, i_position, i_p_draft, i_q_draft)
        i_id = i_draft
        if is_drawn:
            i_hash = begin_hash_anew(i_seed, i_position)
    p_own = p_candidates + (i_r * DRAFTS + i_p) * K if HAS_PROPOSAL else p_ids
    if not is_done:
        for i in range(0, CHUNK, BLOCK):
            o_v = i_split * CHUNK + i + tl.arange(0, BLOCK)
            b_score = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
            if is_sampled:
                b_score = b_score * i_scale + gumbel(end_hash(i_hash, o_v))
            if HAS_PROPOSAL and is_drawn:
                for k in range(K):
                    i_other = tl.load(p_own + k).to(tl.int32)
                    b_score = tl.where(o_v == i_other, float("-inf"), b_score)
            b_ids = tl.where(b_score > b_best, o_v, b_ids)
            b_best = tl.maximum(b_score, b_best)
        i_best, i_id = first_largest(b_best, b_ids)
        if HAS_PROPOSAL and is_drawn:
            i_left, i_left_id = best_candidate(
                p_row, b_q_ids, b_q, i_max, i_total, i_scale, i_hash, i_split, CHUNK
            )
            i_id = tl.where(i_left > i_best, i_left_id, i_id)
            i_best = tl.maximum(i_left, i_best)
            # By rounding, nothing may be left.
            i_id = tl.where(i_best == float("-inf"), i_draft, i_id)
    i_out = i_n * tl.num_programs(1) + i_split
    tl.store(p_best + i_out, i_best)
    tl.store(p_ids + i_out, i_id)


@triton.jit(do_not_specialize=["p_ids"])
def merge_samples_kernel(p_out, p_best, p_ids, SPLITS, BLOCK: tl.constexpr):
    """One program per row."""
    i_n, o_s = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m_s = o_s < SPLITS
    b_best = tl.load(p_best + i_n * SPLITS + o_s, mask=m_s, other=float("-inf"))
    b_ids = tl.load(p_ids + i_n * SPLITS + o_s, mask=m_s, other=2147483647)
    _, i_id = first_largest(b_best, b_ids)
    tl.store(p_out + i_n, i_id.to(tl.int64))


def sample_whole(out: Tensor, logits: Tensor, noise: BlockNoise, proposal: Proposal | None) -> None:
    """Write what `TorchOps.sample` returns without filters, in two launches, with a proposal in
    three.

    Args:
        out: int64 `[N]`, written.
        logits: `[N, V]`, rows of any stride.
        noise, proposal: see there.
    """
    count, width = logits.shape
    if not count:
        return
    splits, parts, device = triton.cdiv(width, CHUNK), part_count(width), logits.device
    best, ids = torch.empty(2, count, splits, dtype=torch.float32, device=device)
    ids = ids.view(torch.int32)
    sums: Sums | None = None
    if proposal is not None:
        of_parts = torch.empty(2, count, parts, dtype=torch.float32, device=device)
        sums = Sums(of_parts[0], of_parts[1], noise.temperatures)
        sum_parts(logits, sums)
    maxima, totals, _ = sums or (None, None, None)
    sample_whole_kernel[(count, splits)](
        best, ids, logits, *noise, maxima, totals, *(proposal or (None, None, None, None)),
        logits.stride(0), 0 if proposal is None else proposal.block.stride(0), width,
        count // len(noise.seeds), 0 if proposal is None else proposal.candidates.shape[1], parts,
        **proposal_sizes(proposal), BLOCK_PARTS=triton.next_power_of_2(parts), CHUNK=CHUNK,
        BLOCK=BLOCK,
    )  # fmt: skip
    merge_samples_kernel[(count,)](
        out, best, ids, splits, BLOCK=triton.next_power_of_2(splits), num_warps=1
    )


def proposal_sizes(proposal: Proposal | None) -> dict[str, int]:
    """The sizes of a proposal that kernels are compiled for."""
    k = 1 if proposal is None else proposal.candidates.shape[-1]
    return {"K": k, "BLOCK_Q": triton.next_power_of_2(k)}


def traffic(count: int, width: int, itemsize: int) -> Traffic:
    """Bytes of the last two launches, of N rows and logits of `itemsize` bytes, none of which
    follows an accepted draft."""
    splits = triton.cdiv(width, CHUNK)
    return Traffic(count * (width * itemsize + 28 * splits), count * (8 * splits + 8))
