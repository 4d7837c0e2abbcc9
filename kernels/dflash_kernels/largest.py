"""The likeliest tokens, and those with the target's noise, of logits that are read once. Names as
in `gated_delta_fold`.

Letters in shapes: R requests; P drafts of a block; N = R P; V tokens of a rank's vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.noise import PLAIN, LogitScale

# Columns of a program, and of one of its turns.
CHUNK, BLOCK = 8192, 1024


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


# Batches and blocks of any size share a compilation: the number of drafts decides where the parts'
# ids begin.
@triton.heuristics({"HAS_TOKENS": lambda args: args["p_tokens"] is not None})
@triton.jit(do_not_specialize=["p_ids", "N", "DRAFTS"])
def largest_kernel(
    p_best, p_ids, p_logits, p_seeds, p_temperatures, p_seq_lens, p_tokens, s_logits, V, FIRST, N,
    DRAFTS, SPLITS, MULTIPLIER, SOFTCAP, HAS_TOKENS: tl.constexpr, HAS_CAP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per draft and CHUNK columns."""
    i_n, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_r = i_n // DRAFTS
    i_temperature = tl.load(p_temperatures + i_r)
    is_sampled = i_temperature > 0
    i_seed = tl.load(p_seeds + i_r)
    i_position = tl.load(p_seq_lens + i_r) + i_n % DRAFTS
    # A request without noise divides by 1.
    i_scale = 1.0 / tl.where(is_sampled, i_temperature, 1.0)
    i_hash = begin_hash(i_seed, i_position)
    b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_ids = tl.zeros((BLOCK,), tl.int32)
    b_noisy_best, b_noisy_ids = b_best, b_ids
    for i in range(0, CHUNK, BLOCK):
        o_v = i_split * CHUNK + i + tl.arange(0, BLOCK)
        b_x = tl.load(p_logits + i_n * s_logits + o_v, mask=o_v < V, other=float("-inf"))
        b_x = b_x.to(tl.float32)
        # NaN is the largest of all.
        b_x = tl.where(b_x == b_x, b_x, float("inf"))
        b_id = o_v + FIRST
        b_ids = tl.where(b_x > b_best, b_id, b_ids)
        b_best = tl.maximum(b_x, b_best)
        if is_sampled:
            b_token, b_scaled = b_id, b_x * MULTIPLIER
            if HAS_TOKENS:
                b_token = tl.load(p_tokens + b_id, mask=o_v < V, other=0)
            if HAS_CAP:
                # tanh(x) = 2 sigmoid(2 x) - 1
                b_capped = SOFTCAP * (2.0 * tl.sigmoid(2.0 * b_scaled / SOFTCAP) - 1.0)
                b_scaled = tl.where(tl.abs(b_scaled) == float("inf"), b_scaled, b_capped)
            b_noisy = b_scaled * i_scale + gumbel(end_hash(i_hash, b_token))
            b_noisy_ids = tl.where(b_noisy > b_noisy_best, b_id, b_noisy_ids)
            b_noisy_best = tl.maximum(b_noisy, b_noisy_best)
    i_best, i_id = first_largest(b_best, b_ids)
    i_noisy_best, i_noisy_id = i_best, i_id
    if is_sampled:
        i_noisy_best, i_noisy_id = first_largest(b_noisy_best, b_noisy_ids)
    i_out = i_n * SPLITS + i_split
    tl.store(p_best + i_out, i_best)
    tl.store(p_ids + i_out, i_id)
    tl.store(p_best + N.to(tl.int64) * SPLITS + i_out, i_noisy_best)
    tl.store(p_ids + N.to(tl.int64) * SPLITS + i_out, i_noisy_id)


@triton.jit(do_not_specialize=["p_ids"])
def merge_largest_kernel(p_out, p_out_ids, p_best, p_ids, SPLITS, BLOCK: tl.constexpr):
    """One program per draft and rule."""
    i_n, o_s = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m_s = o_s < SPLITS
    b_best = tl.load(p_best + i_n * SPLITS + o_s, mask=m_s, other=float("-inf"))
    b_ids = tl.load(p_ids + i_n * SPLITS + o_s, mask=m_s, other=2147483647)
    i_best, i_id = first_largest(b_best, b_ids)
    tl.store(p_out + i_n, i_best)
    tl.store(p_out_ids + i_n, i_id.to(tl.int64))


def largest(
    best: Tensor,
    ids: Tensor,
    logits: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    seq_lens: Tensor,
    first_id: int,
    scale: LogitScale = PLAIN,
    token_ids: Tensor | None = None,
) -> None:
    """As `TorchOps.largest`, in two launches.

    Args:
        best: float32 `[2, N]`, written.
        ids: int64 `[2, N]`, written.
        logits: `[N, V]`, rows of any stride.
        seeds, temperatures, seq_lens: int64, float32 and int64 `[R]`, as in `BlockNoise`.
        first_id, scale, token_ids: see there.
    """
    count, width = logits.shape
    if not count:
        return
    splits = triton.cdiv(width, CHUNK)
    parts = torch.empty(2, 2, count, splits, dtype=torch.float32, device=logits.device)
    part_best, part_ids = parts[0], parts[1].view(torch.int32)
    largest_kernel[(count, splits)](
        part_best, part_ids, logits, seeds, temperatures, seq_lens, token_ids, logits.stride(0),
        width, first_id, count, count // len(seeds), splits, scale.multiplier, scale.softcap or 1.0,
        HAS_CAP=scale.softcap is not None, CHUNK=CHUNK, BLOCK=BLOCK,
    )  # fmt: skip
    merge_largest_kernel[(2 * count,)](
        best, ids, part_best, part_ids, splits, BLOCK=triton.next_power_of_2(splits), num_warps=1
    )


def traffic(count: int, width: int, itemsize: int) -> Traffic:
    """Bytes of both launches, of N drafts and logits of `itemsize` bytes, without those of
    `token_ids`, which stay in the cache."""
    splits = triton.cdiv(width, CHUNK)
    read = count * (width * itemsize + 20 * splits) + 2 * count * splits * 8
    return Traffic(read, 2 * count * (splits * 8 + 12))
