"""The walk over the candidates of a draft, by both rules, in one launch. Names as in
`gated_delta_fold`.

Letters in shapes: R requests, P drafts of a block, K candidates, r rank, V tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.noise import begin_hash, end_hash
from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.noise import RULES, SAMPLED, BlockNoise
from sglang_dflash.drafting.ops import Edges

_SAMPLED = tl.constexpr(SAMPLED)


@triton.jit
def _gumbel(b_hash):
    """`drafting.noise.gumbel` of hashes, float32. (`noise.gumbel` is less exact.)"""
    b_log = tl.log(b_hash.to(tl.float64) / 4294967295.0)
    # -(2 ** -32), and the smallest number that is finite.
    b_log = tl.minimum(tl.maximum(b_log, -1.7976931348623157e308), -2.3283064365386963e-10)
    return (-tl.log(-b_log)).to(tl.float32)


# As for `accept_kernel`, whose result a bonus token is.
@triton.heuristics(
    {
        "HAS_NOISE": lambda args: args["p_seeds"] is not None,
        "HAS_EDGES": lambda args: args["p_hidden"] is not None,
    }
)
@triton.jit(do_not_specialize=["p_bonus", "p_seeds", "p_temperatures", "p_seq_lens", "P"])
def walk_kernel(
    p_out, p_scores, p_logits, p_ids, p_bonus, p_hidden, p_predecessors, p_successors, p_seeds,
    p_temperatures, p_seq_lens, P, K: tl.constexpr, RANK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_EDGES: tl.constexpr,
):  # fmt: skip
    """One program per request and rule."""
    i_r, i_rule = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_k, o_r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    m_k, m_r = o_k < K, o_r < RANK
    i_before = tl.load(p_bonus + i_r).to(tl.int64)
    if HAS_NOISE:
        i_seed, i_start = tl.load(p_seeds + i_r), tl.load(p_seq_lens + i_r)
        temperature = tl.load(p_temperatures + i_r)
        is_noisy = (i_rule == _SAMPLED) & (temperature > 0)
    for i_p in range(P):
        i_row = i_r * P + i_p
        b_ids = tl.load(p_ids + i_row * K + o_k, mask=m_k, other=0)
        b_scores = tl.load(p_logits + i_row * K + o_k, mask=m_k, other=float("-inf"))
        if HAS_EDGES:
            p_next = p_successors + b_ids[:, None] * RANK + o_r[None, :]
            b_next = tl.load(p_next, mask=m_k[:, None] & m_r[None, :], other=0.0)
            b_hidden = tl.load(p_hidden + i_row * RANK + o_r, mask=m_r, other=0.0)
            b_before = tl.load(p_predecessors + i_before * RANK + o_r, mask=m_r, other=0.0)
            # Products are rounded where torch rounds them.
            b_query = (b_before.to(tl.float32) * b_hidden.to(tl.float32)).to(b_next.dtype)
            b_edges = b_query[None, :].to(tl.float32) * b_next.to(tl.float32)
            b_scores += tl.sum(b_edges.to(b_next.dtype).to(tl.float32), 1)
        if HAS_NOISE:
            i_position = i_start + i_p
            if is_noisy:
                b_scores = tl.div_rn(b_scores, temperature)
            if i_rule == _SAMPLED:
                tl.store(p_scores + i_row * K + o_k, b_scores, mask=m_k)
            if is_noisy:
                b_scores += _gumbel(end_hash(begin_hash(i_seed, i_position), b_ids))
        # NaN counts as the largest, as in torch.
        b_scores = tl.where(b_scores != b_scores, float("inf"), b_scores)
        b_scores = tl.where(m_k, b_scores, float("-inf"))
        best, i_best = tl.max(b_scores, 0, return_indices=True, return_indices_tie_break_left=True)
        i_before = tl.sum(tl.where(o_k == i_best, b_ids, 0), 0)
        i_taken = tl.where(tl.abs(best) < float("inf"), i_before, -1)
        tl.store(p_out + i_rule * tl.num_programs(0) * P + i_row, i_taken)


def walk(
    out: Tensor,
    scores: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    bonus: Tensor,
    edges: Edges | None,
    noise: BlockNoise | None,
) -> None:
    """Write what its twin, `TorchOps.walk`, returns: tokens to `out`, and with noise the
    distributions to `scores`. All tensors are contiguous, and those of `edges` have one dtype.

    Raises:
        ValueError: `logits` or `ids` is not contiguous.
    """
    for name, values in (("logits", logits), ("ids", ids)):
        if not values.is_contiguous():
            raise ValueError(f"{name}: strides {values.stride()}; dense rows are required")
    requests, drafts, k = ids.shape
    rank = 0 if edges is None else edges.hidden.shape[-1]
    if not requests:
        return
    rules = 1 if noise is None else len(RULES)
    walk_kernel[(requests, rules)](
        out, scores, logits, ids, bonus, *(edges or (None, None, None)),
        *(noise or (None, None, None)), P=drafts, K=k, RANK=rank,
        BLOCK_K=triton.next_power_of_2(k), BLOCK_R=triton.next_power_of_2(max(rank, 1)),
        num_warps=4,
    )  # fmt: skip


def traffic(
    requests: int, drafts: int, k: int, rank: int, itemsize: int, *, noise: bool
) -> Traffic:
    """Bytes of one launch; tables of a rank, 0 for none, have elements of `itemsize` bytes."""
    of_draft = k * (8 + 4 + rank * itemsize) + 2 * rank * itemsize
    rules = 1 + noise
    read = rules * requests * (drafts * of_draft + 8 + noise * 20)
    return Traffic(read, requests * drafts * (8 * rules + 4 * k * noise))
