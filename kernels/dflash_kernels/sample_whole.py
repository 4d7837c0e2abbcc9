"""A token of each row, sampled from the whole vocabulary. Names as in `gated_delta_fold`.

After a draft that was drawn it is the draft, or a token of what its distribution lacks. The logits
are read once more for that, but not of accepted drafts, nor behind a rejected one.

Letters in shapes: R requests; W positions of a step; N = R W rows; V tokens; K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.candidates import Sums, largest_of_chunks, part_count
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
from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.noise import BlockNoise, Proposal

# Columns of a program, and of one of its turns.
CHUNK, BLOCK = 8192, 1024
# What `out` holds of a row that has no token yet: it is one of all tokens, or one of what is left
# after a rejected draft, or one of all tokens if the filters keep that.
WHOLE, REJECTED, OPEN = -1, -2, -3
_WHOLE, _REJECTED = tl.constexpr(WHOLE), tl.constexpr(REJECTED)
# Rows that are looked at together.
_ROWS = tl.constexpr(32)


@triton.jit
def best_of_others(
    p_row, p_own, is_sampled, is_drawn, i_scale, i_hash, i_split, V, HAS_PROPOSAL: tl.constexpr,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest score in a program's columns, and its token; that of no candidate of a drawn
    draft."""
    b_best, b_ids = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
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
    return first_largest(b_best, b_ids)


@triton.jit
def best_candidate(
    p_row, b_ids, b_q, i_draft, i_max, i_total, i_scale, i_hash, i_split, CHUNK: tl.constexpr
):  # fmt: skip
    """The largest score of the candidates in a program's columns, and its token: the score of the
    part of their probabilities that the draft's leave, in the unit of the other scores."""
    b_x = tl.load(p_row + b_ids, mask=b_ids >= 0, other=float("-inf")).to(tl.float32)
    b_left = left_over(tl.exp((b_x - i_max) * i_scale) / i_total, b_q, b_ids == i_draft)
    b_scores = tl.log(b_left) + tl.log(i_total) + i_max * i_scale
    b_scores += gumbel(end_hash(i_hash, b_ids))
    is_here = (b_ids >= 0) & (b_ids // CHUNK == i_split)
    return first_largest(tl.where(is_here, b_scores, float("-inf")), b_ids)


@triton.jit
def judge_draft(
    p_row, i_seed, i_position, i_scale, i_max, i_total, i_draft, is_drawn, b_q_ids, b_q
):  # fmt: skip
    """Return what `out` holds of a row after a draft: the draft if it is accepted."""
    i_x = tl.load(p_row + i_draft, mask=is_drawn, other=float("-inf")).to(tl.float32)
    i_p = tl.exp((i_x - i_max) * i_scale) / i_total
    i_q = tl.sum(tl.where(b_q_ids == i_draft, b_q, 0.0))
    i_judged = tl.where(is_accepted(i_seed, i_position, i_p, i_q), i_draft, _REJECTED)
    return tl.where(is_drawn, i_judged, _WHOLE)


@triton.jit(do_not_specialize=["p_sums", "s_block", "POSITIONS", "DRAFTS"])
def judge_drafts_kernel(
    p_out, p_logits, p_seeds, p_temperatures, p_seq_lens, p_maxima, p_sums, p_block, p_is_drawn,
    p_candidates, p_scores, s_logits, s_block, POSITIONS, DRAFTS, PARTS, K: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    i_n = tl.program_id(0).to(tl.int64)
    i_r, i_p = i_n // POSITIONS, i_n % POSITIONS
    i_seed, i_position = tl.load(p_seeds + i_r), tl.load(p_seq_lens + i_r) + i_p
    i_scale = inverse_temperature(p_temperatures + i_r)
    i_max, i_total = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
    i_draft, is_drawn, b_q_ids, b_q = load_proposal(
        p_block, p_is_drawn, p_candidates, p_scores, s_block, i_r, i_p, POSITIONS, DRAFTS, K,
        BLOCK_Q,
    )  # fmt: skip
    i_state = judge_draft(
        p_logits + i_n * s_logits, i_seed, i_position, i_scale, i_max, i_total, i_draft, is_drawn,
        b_q_ids, b_q,
    )  # fmt: skip
    tl.store(p_out + i_n, i_state.to(tl.int64))


@triton.jit
def is_behind(p_out, p_block, p_is_drawn, s_block, i_r, i_p, POSITIONS, ROWS: tl.constexpr):
    """Return whether a draft before a row is known not to be accepted; False for a request whose
    drafts were not drawn."""
    i_last = tl.where(tl.load(p_is_drawn + i_r) != 0, i_p, 0)
    i_count = tl.zeros((), tl.int32)
    for i in range(0, i_last, ROWS):
        o_p = i + tl.arange(0, ROWS)
        m_p = o_p < i_last
        b_state = tl.load(p_out + i_r * POSITIONS + o_p, mask=m_p, other=_WHOLE)
        b_draft = tl.load(p_block + i_r * s_block + 1 + o_p, mask=m_p, other=_WHOLE)
        is_other = (b_state >= 0) & (b_state != b_draft)
        i_count += tl.sum((is_other | (b_state == _REJECTED)).to(tl.int32))
    return i_count > 0


# Batches and blocks of any size share a compilation: the number of rows decides where the parts'
# ids begin.
@triton.heuristics(
    {
        "HAS_STATES": lambda args: args["p_out"] is not None,
        "HAS_PROPOSAL": lambda args: args["p_block"] is not None,
    }
)
@triton.jit(do_not_specialize=["p_ids", "p_sums", "s_block", "POSITIONS", "DRAFTS"])
def sample_whole_kernel(
    p_best, p_ids, p_logits, p_out, p_seeds, p_temperatures, p_seq_lens, p_maxima, p_sums, p_block,
    p_is_drawn, p_candidates, p_scores, s_logits, s_block, V, POSITIONS, DRAFTS, PARTS,
    HAS_STATES: tl.constexpr, HAS_PROPOSAL: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and CHUNK columns. A row that has its token, or needs none, has the
    largest score."""
    i_n, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_r, i_p = i_n // POSITIONS, i_n % POSITIONS
    p_row = p_logits + i_n * s_logits
    i_state = tl.full((), _WHOLE, tl.int32)
    if HAS_STATES:
        i_state = tl.load(p_out + i_n).to(tl.int32)
    is_done = i_state >= 0
    if HAS_PROPOSAL:
        is_done |= is_behind(p_out, p_block, p_is_drawn, s_block, i_r, i_p, POSITIONS, _ROWS)
    is_drawn = i_state == _REJECTED
    i_best, i_id = tl.full((), float("inf"), tl.float32), tl.maximum(i_state, 0)
    if not is_done:
        i_temperature = tl.load(p_temperatures + i_r)
        is_sampled = i_temperature > 0
        # A request without noise divides by 1.
        i_scale = 1.0 / tl.where(is_sampled, i_temperature, 1.0)
        i_seed, i_position = tl.load(p_seeds + i_r), tl.load(p_seq_lens + i_r) + i_p
        i_hash = begin_hash(i_seed, i_position)
        if HAS_PROPOSAL and is_drawn:
            i_hash = begin_hash_anew(i_seed, i_position)
        p_own = p_candidates + (i_r * DRAFTS + i_p) * K if HAS_PROPOSAL else p_ids
        i_best, i_id = best_of_others(
            p_row, p_own, is_sampled, is_drawn, i_scale, i_hash, i_split, V, HAS_PROPOSAL, K, CHUNK,
            BLOCK,
        )  # fmt: skip
        if HAS_PROPOSAL and is_drawn:
            i_draft, _, b_q_ids, b_q = load_proposal(
                p_block, p_is_drawn, p_candidates, p_scores, s_block, i_r, i_p, POSITIONS, DRAFTS,
                K, BLOCK_Q,
            )  # fmt: skip
            i_max, i_total = total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS)
            i_left, i_left_id = best_candidate(
                p_row, b_q_ids, b_q, i_draft, i_max, i_total, i_scale, i_hash, i_split, CHUNK
            )
            i_id = tl.where(i_left > i_best, i_left_id, i_id)
            i_best = tl.maximum(i_left, i_best)
    i_out = i_n * tl.num_programs(1) + i_split
    tl.store(p_best + i_out, i_best)
    tl.store(p_ids + i_out, i_id)


@triton.jit
def merge_splits(p_best, p_ids, i_n, SPLITS, BLOCK_SPLITS: tl.constexpr):
    """The largest score of a row, and its token."""
    o_s = tl.arange(0, BLOCK_SPLITS)
    m_s = o_s < SPLITS
    b_best = tl.load(p_best + i_n * SPLITS + o_s, mask=m_s, other=float("-inf"))
    b_ids = tl.load(p_ids + i_n * SPLITS + o_s, mask=m_s, other=2147483647)
    return first_largest(b_best, b_ids)


@triton.jit(do_not_specialize=["p_ids"])
def merge_samples_kernel(p_out, p_best, p_ids, SPLITS, BLOCK_SPLITS: tl.constexpr):
    """One program per row."""
    i_n = tl.program_id(0).to(tl.int64)
    _, i_id = merge_splits(p_best, p_ids, i_n, SPLITS, BLOCK_SPLITS)
    tl.store(p_out + i_n, i_id.to(tl.int64))


def sample_whole(out: Tensor, logits: Tensor, noise: BlockNoise, proposal: Proposal | None) -> None:
    """Write what `TorchOps.sample` returns without filters, in two launches, with a proposal in
    four.

    Args:
        out: int64 `[N]`, written.
        logits: `[N, V]`, rows of any stride.
        noise, proposal: see there.
    """
    count, width = logits.shape
    if not count:
        return
    parts, sums, states = part_count(width), None, None
    if proposal is not None:
        maxima, totals = torch.empty(2, count, parts, dtype=torch.float32, device=logits.device)
        sums, states = Sums(maxima, totals, noise.temperatures), out
        largest_of_chunks(logits, sums)
        judge_drafts_kernel[(count,)](
            out, logits, *noise, maxima, totals, *proposal, logits.stride(0),
            *proposal_shape(proposal, count // len(noise.seeds)), parts, **proposal_sizes(proposal),
            BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    best, ids = scan(logits, noise, sums, proposal, states)
    splits = best.shape[1]
    merge_samples_kernel[(count,)](
        out, best, ids, splits, BLOCK_SPLITS=triton.next_power_of_2(splits), num_warps=1
    )


def scan(
    logits: Tensor,
    noise: BlockNoise,
    sums: Sums | None,
    proposal: Proposal | None,
    states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row in every CHUNK columns, and its token: float32 and int32
    `[N, SPLITS]`. A row that has its token, or needs none, has the score inf.

    Args:
        sums: of the logits; None without a proposal.
        states: int64 `[N]`, tokens, and WHOLE, REJECTED or OPEN; None if all are WHOLE.
    """
    (count, width), drawn, device = logits.shape, proposal is not None, logits.device
    splits, parts = triton.cdiv(width, CHUNK), part_count(width)
    best, ids = torch.empty(2, count, splits, dtype=torch.float32, device=device)
    ids = ids.view(torch.int32)
    maxima, totals, _ = (drawn and sums) or (None, None, None)
    s_block, positions, drafts = proposal_shape(proposal, count // len(noise.seeds))
    sample_whole_kernel[(count, splits)](
        best, ids, logits, states, *noise, maxima, totals,
        *(proposal or (None, None, None, None)), logits.stride(0), s_block, width, positions,
        drafts, parts, **proposal_sizes(proposal), BLOCK_PARTS=triton.next_power_of_2(parts),
        CHUNK=CHUNK, BLOCK=BLOCK,
    )  # fmt: skip
    return best, ids


def proposal_shape(proposal: Proposal | None, positions: int) -> tuple[int, int, int]:
    """The elements from a block to the next, W and P."""
    if proposal is None:
        return 0, positions, 0
    return proposal.block.stride(0), positions, proposal.candidates.shape[1]


def proposal_sizes(proposal: Proposal | None) -> dict[str, int]:
    """The sizes of a proposal that kernels are compiled for."""
    k = 1 if proposal is None else proposal.candidates.shape[-1]
    return {"K": k, "BLOCK_Q": triton.next_power_of_2(k)}


def traffic(logits: Tensor) -> Traffic:
    """Bytes of two launches for logits `[N, V]`, without a proposal."""
    count, width = logits.shape
    splits = triton.cdiv(width, CHUNK)
    read = width * logits.element_size() + 28 * splits
    return Traffic(count * read, count * (8 * splits + 8))


def drawn_traffic(logits: Tensor, candidates: Tensor) -> Traffic:
    """Bytes of the last three launches for logits `[N, V]`, if all drafts of a proposal have been
    drawn from its `candidates`, and are rejected."""
    (count, width), size, (requests, _, k) = logits.shape, logits.element_size(), candidates.shape
    drafts, parts, splits = count // requests - 1, part_count(width), triton.cdiv(width, CHUNK)
    of_draft, turns = 12 * k + 8 + size, CHUNK // BLOCK
    judged = count * (21 + 8 * parts) + requests * drafts * of_draft
    # Of a row behind another, what this one and those before it hold.
    states = count * splits * (9 + 8 * drafts)
    again = 8 * k * turns + of_draft + 21 + 8 * parts + (k - 1) * size
    scanned = requests * (width * size + splits * again)
    read = judged + states + scanned + 8 * splits * count
    return Traffic(read, count * (16 + 8 * splits))
