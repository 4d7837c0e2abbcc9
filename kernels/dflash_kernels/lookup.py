"""Drafts that continue what a request has already seen. Names as in `gated_delta_fold`.

Letters in shapes: R requests, B block positions, S pieces of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.lookup import LONG_MATCH, LONGEST_MATCH, SHORT_MATCH

# Positions of a piece.
PIECE = 1024
# Pieces whose results are read at once.
PIECES = 64


# What a start-up check cannot know is not specialized, or a first step would compile.
@triton.jit(do_not_specialize=["s_texts_r", "S"])
def find_match_kernel(
    p_found, p_block, p_texts, p_rows, p_seq_lens, s_texts_r, S, B,
    LONGEST: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program per request and piece of its text: the longest match that ends there, as
    length * 2^32 + end."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    p_text = p_texts + tl.load(p_rows + i_r).to(tl.int64) * s_texts_r
    b_newest = tl.load(p_block + i_r * B).to(tl.int32)
    o_end = i_s * PIECE + tl.arange(0, PIECE)
    m_end = o_end < i_len
    b_length = tl.zeros((PIECE,), tl.int32)
    for k in tl.static_range(LONGEST):
        m_end = m_end & (o_end >= k)
        if k > 0:
            b_newest = tl.load(p_text + i_len - k, mask=i_len >= k, other=-1)
        b_token = tl.load(p_text + o_end - k, mask=m_end, other=-2)
        m_end = m_end & (b_token == b_newest)
        b_length += m_end.to(tl.int32)
    b_key = b_length.to(tl.int64) * 4294967296 + o_end
    tl.store(p_found + i_r * S + i_s, tl.max(tl.where(b_length > 0, b_key, 0), 0))


@triton.jit(do_not_specialize=["s_texts_r", "S", "VOCAB"])
def take_match_kernel(
    p_taken, p_block, p_found, p_texts, p_rows, p_seq_lens, s_texts_r, S, B, VOCAB,
    LONG: tl.constexpr, SHORT: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    i_r = tl.program_id(0).to(tl.int64)
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    p_text = p_texts + tl.load(p_rows + i_r).to(tl.int64) * s_texts_r
    b_key = tl.zeros((PIECES,), tl.int64)
    for i_first in range(0, S, PIECES):
        o_s = i_first + tl.arange(0, PIECES)
        b_key = tl.maximum(b_key, tl.load(p_found + i_r * S + o_s, mask=o_s < S, other=0))
    b_best = tl.max(b_key, 0)
    i_length, i_end = (b_best >> 32).to(tl.int32), (b_best & 4294967295).to(tl.int32)
    o_b = tl.arange(0, BLOCK)
    m_b = (o_b > 0) & (o_b < B)
    b_bonus = tl.load(p_block + i_r * B)
    b_draft = tl.load(p_block + i_r * B + o_b, mask=m_b, other=0)
    o_from = i_end + 1 + (o_b - 1 + B * (o_b == 0)) % tl.maximum(i_len - i_end, 1)
    b_seen = tl.load(p_text + o_from, mask=m_b & (o_from < i_len), other=0).to(tl.int64)
    b_seen = tl.where(o_from == i_len, b_bonus, b_seen)
    is_begun = tl.sum(((o_b == 1) & (b_seen == b_draft)).to(tl.int32), 0) > 0
    is_taken = (i_length >= LONG) | ((i_length >= SHORT) & is_begun)
    m_token = m_b & is_taken & (b_seen >= 0) & (b_seen < VOCAB)
    tl.store(p_block + i_r * B + o_b, b_seen, mask=m_token)
    tl.store(p_taken + i_r, is_taken)


def continue_seen(block: Tensor, texts: Tensor, requests: RequestSlots, vocab_size: int) -> Tensor:
    """See its twin, `drafting.lookup.continue_seen`, whose arguments and result these are.

    Raises:
        ValueError: `texts` is not contiguous along positions, or `block` is not contiguous.
    """
    if texts.stride(1) != 1 or not block.is_contiguous():
        raise ValueError(f"strides {texts.stride()} and {block.stride()}; rows have to be dense")
    _, rows, seq_lens, longest = requests
    width, pieces = block.shape[1], piece_count(longest)
    found = torch.empty(len(block), pieces, dtype=torch.int64, device=block.device)
    taken = torch.empty(len(block), dtype=torch.bool, device=block.device)
    if not len(block):
        return taken
    of_texts = texts, rows, seq_lens, texts.stride(0), pieces, width
    find_match_kernel[(len(block), pieces)](
        found, block, *of_texts, LONGEST=LONGEST_MATCH, PIECE=PIECE
    )
    take_match_kernel[(len(block),)](
        taken, block, found, *of_texts, vocab_size,
        LONG=LONG_MATCH, SHORT=SHORT_MATCH,
        PIECES=PIECES, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return taken


def piece_count(longest: int) -> int:
    """S, for texts of up to so many tokens before the newest one."""
    return max(1, triton.cdiv(longest, PIECE))


def find_traffic(seq_lens: Sequence[int], longest: int, compared: int = 0) -> Traffic:
    """Bytes of finding matches.

    Args:
        seq_lens, longest: see `RequestSlots`.
        compared: comparisons of a place with the end of the text beyond the first token.
    """
    pieces = piece_count(longest)
    newest = sum(min(n, LONGEST_MATCH - 1) for n in seq_lens)
    read = len(seq_lens) * pieces * 24 + pieces * newest * 4 + 4 * (sum(seq_lens) + compared)
    return Traffic(read, 8 * len(seq_lens) * pieces)


def take_traffic(requests: int, longest: int, block: int, seen: int, taken: int = 0) -> Traffic:
    """Bytes of taking them.

    Args:
        block: B.
        seen: tokens of the continuations that stand in the table.
        taken: drafts that are replaced.
    """
    read = requests * (8 * piece_count(longest) + 24 + 8 * (block - 1)) + 4 * seen
    return Traffic(read, requests + 8 * taken)
