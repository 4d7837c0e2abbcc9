"""The random numbers of `drafting.noise`, for other kernels. Names as in `gated_delta_fold`.

Letters in shapes: K candidates of a draft.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.drafting.noise import ACCEPTING, LEAST_LEFT, REDRAWING

_ACCEPTING, _REDRAWING = tl.constexpr(ACCEPTING), tl.constexpr(REDRAWING)
_LEAST_LEFT = tl.constexpr(LEAST_LEFT)


@triton.jit
def mix(i_hash, b_word):
    """One more 32-bit word in the state of MurmurHash3."""
    b_word = b_word * 0xCC9E2D51
    b_word = ((b_word << 15) | (b_word >> 17)) * 0x1B873593
    b_hash = i_hash ^ b_word
    return ((b_hash << 13) | (b_hash >> 19)) * 5 + 0xE6546B64


@triton.jit
def begin_hash(i_seed, i_position):
    """The state of MurmurHash3 after a seed and a position, for the noise of any token there."""
    i_hash = mix(tl.zeros((), tl.uint32), i_seed.to(tl.uint32))
    return mix(mix(i_hash, (i_seed >> 32).to(tl.uint32)), i_position.to(tl.uint32))


@triton.jit
def end_hash(i_hash, b_tokens):
    """MurmurHash3 of a seed, a position and each token."""
    b_hash = mix(i_hash, b_tokens.to(tl.uint32)) ^ 16
    b_hash = (b_hash ^ (b_hash >> 16)) * 0x85EBCA6B
    b_hash = (b_hash ^ (b_hash >> 13)) * 0xC2B2AE35
    return b_hash ^ (b_hash >> 16)


@triton.jit
def gumbel(b_hash):
    """Noise of hashes: -log(-log(x)) of x = hash / (2 ** 32 - 1)."""
    # The largest noise decides, and has x close to 1, where float32 has few values: so -log(x) is
    # the series of -log(1 - y) there.
    b_y = (0xFFFFFFFF - b_hash).to(tl.float32) * (1.0 / 4294967295.0)
    b_series = 1 / 3 + b_y * (1 / 4 + b_y * (1 / 5 + b_y * (1 / 6 + b_y * (1 / 7))))
    b_series = b_y * (1.0 + b_y * (0.5 + b_y * b_series))
    b_log = -tl.log(tl.maximum(b_hash.to(tl.float32) * (1.0 / 4294967295.0), 1e-20))
    b_log = tl.where(b_y < 0.125, b_series, b_log)
    return -tl.log(tl.maximum(b_log, 2.3283064365386963e-10))


@triton.jit
def first_largest(b_best, b_ids):
    """The largest value, and of equal ones the lowest id."""
    i_best = tl.max(b_best)
    return i_best, tl.min(tl.where(b_best == i_best, b_ids, 2147483647))


@triton.jit
def inverse_temperature(p_temperature):
    """1 / temperature; 1 for a greedy request."""
    i_temperature = tl.load(p_temperature)
    return 1.0 / tl.where(i_temperature > 0, i_temperature, 1.0)


@triton.jit
def total_weight(p_maxima, p_sums, i_n, i_scale, PARTS, BLOCK_PARTS: tl.constexpr):
    """The largest logit of a row, and the sum of exp((logit - largest) / temperature)."""
    o_p = tl.arange(0, BLOCK_PARTS)
    m_p = o_p < PARTS
    b_maxima = tl.load(p_maxima + i_n * PARTS + o_p, mask=m_p, other=float("-inf"))
    b_sums = tl.load(p_sums + i_n * PARTS + o_p, mask=m_p, other=0.0)
    i_max = tl.max(b_maxima)
    return i_max, tl.sum(b_sums * tl.exp((b_maxima - i_max) * i_scale))


@triton.jit
def load_proposal(
    p_block, p_is_drawn, p_candidates, p_scores, s_block, i_r, i_p, POSITIONS, DRAFTS,
    K: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The draft after position `i_p`, whether it was drawn, and the tokens and probabilities that
    it was drawn from; no token is -1."""
    o_q, has_draft = tl.arange(0, BLOCK_Q), (i_p < DRAFTS) & (i_p < POSITIONS - 1)
    m_q = (o_q < K) & has_draft
    i_row = i_r * DRAFTS + i_p
    b_ids = tl.load(p_candidates + i_row * K + o_q, mask=m_q, other=-1).to(tl.int32)
    b_scores = tl.load(p_scores + i_row * K + o_q, mask=m_q, other=float("-inf"))
    b_scores = tl.where(b_scores == b_scores, b_scores, float("inf"))
    i_max = tl.max(b_scores)
    b_q = tl.where(m_q, tl.exp(b_scores - i_max), 0.0)
    is_drawn = has_draft & (tl.load(p_is_drawn + i_r) != 0) & (tl.abs(i_max) < float("inf"))
    i_draft = tl.load(p_block + i_r * s_block + 1 + i_p, mask=has_draft, other=0).to(tl.int32)
    return i_draft, is_drawn, b_ids, b_q / tl.sum(b_q)


@triton.jit
def is_accepted(i_seed, i_position, i_p_draft, i_q_draft):
    """Return whether a drawn draft of these probabilities is accepted."""
    i_hash = end_hash(begin_hash(i_seed ^ _ACCEPTING, i_position), tl.zeros((), tl.int32))
    return (i_hash >> 8).to(tl.float32) * (1.0 / 16777216.0) * i_q_draft < i_p_draft


@triton.jit
def left_over(b_p, b_q, is_draft):
    """Return what a rejected draft's distribution leaves of the target's: max(0, p - q)."""
    return tl.where(is_draft, 0.0, tl.maximum(b_p - b_q, b_p * _LEAST_LEFT))


@triton.jit
def begin_hash_anew(i_seed, i_position):
    """`begin_hash` for a token that is drawn after a draft was rejected."""
    return begin_hash(i_seed ^ _REDRAWING, i_position)
