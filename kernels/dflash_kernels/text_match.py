"""Kernels that search a request's text for its newest tokens. Names as in `gated_delta_fold`.

Letters in shapes: R requests, S pieces of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.text_match import LONGEST_MATCH

# Positions of a piece.
PIECE = 1024
# Pieces whose results are read at once.
PIECES = 64


# What a start-up check cannot know is not specialized, or a first step would compile.
@triton.jit(do_not_specialize=["s_texts_r", "S"])
def find_match_kernel(
    p_matches, p_bonus, p_texts, p_rows, p_seq_lens, s_texts_r, S,
    LONGEST: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program per request and piece of its text: the longest match that ends there, as
    length * 2^32 + end."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    p_text = p_texts + tl.load(p_rows + i_r).to(tl.int64) * s_texts_r
    b_newest = tl.load(p_bonus + i_r).to(tl.int32)
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
    tl.store(p_matches + i_r * S + i_s, tl.max(tl.where(b_length > 0, b_key, 0), 0))


@triton.jit(do_not_specialize=["s_texts_r", "S", "COUNT"])
def take_match_kernel(
    p_lengths, p_followed, p_matches, p_bonus, p_texts, p_rows, p_seq_lens, s_texts_r, S, COUNT,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    i_r = tl.program_id(0).to(tl.int64)
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    p_text = p_texts + tl.load(p_rows + i_r).to(tl.int64) * s_texts_r
    b_key = tl.zeros((PIECES,), tl.int64)
    for i_first in range(0, S, PIECES):
        o_s = i_first + tl.arange(0, PIECES)
        b_key = tl.maximum(b_key, tl.load(p_matches + i_r * S + o_s, mask=o_s < S, other=0))
    b_best = tl.max(b_key, 0)
    i_length, i_end = b_best >> 32, (b_best & 4294967295).to(tl.int32)
    o_b = tl.arange(0, BLOCK)
    m_b = o_b < COUNT
    o_from = i_end + 1 + o_b % tl.maximum(i_len - i_end, 1)
    b_followed = tl.load(p_text + o_from, mask=m_b & (o_from < i_len), other=0).to(tl.int64)
    b_followed = tl.where(o_from == i_len, tl.load(p_bonus + i_r), b_followed)
    tl.store(p_followed + i_r * COUNT + o_b, b_followed, mask=m_b)
    tl.store(p_lengths + i_r, i_length)


def find_match(
    bonus: Tensor, texts: Tensor, requests: RequestSlots, count: int
) -> tuple[Tensor, Tensor]:
    """See its twin, `drafting.text_match.find_match`, whose arguments and results these are.

    Raises:
        ValueError: `texts` is not contiguous along positions, or `bonus` is not contiguous.
    """
    if texts.stride(1) != 1 or not bonus.is_contiguous():
        raise ValueError(f"strides {texts.stride()} and {bonus.stride()}; rows have to be dense")
    _, rows, seq_lens, longest = requests
    pieces = piece_count(longest)
    matches = torch.empty(len(bonus), pieces, dtype=torch.int64, device=bonus.device)
    lengths = torch.empty(len(bonus), dtype=torch.int64, device=bonus.device)
    followed = torch.empty(len(bonus), count, dtype=torch.int64, device=bonus.device)
    if not len(bonus):
        return lengths, followed
    shared = bonus, texts, rows, seq_lens, texts.stride(0), pieces
    find_match_kernel[(len(bonus), pieces)](matches, *shared, LONGEST=LONGEST_MATCH, PIECE=PIECE)
    take_match_kernel[(len(bonus),)](
        lengths, followed, matches, *shared, count,
        PIECES=PIECES, BLOCK=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return lengths, followed


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


def take_traffic(requests: int, longest: int, count: int, in_text: int) -> Traffic:
    """Bytes of taking them.

    Args:
        count: tokens that follow a match.
        in_text: those of them that stand in the table.
    """
    read = requests * (8 * piece_count(longest) + 24) + 4 * in_text
    return Traffic(read, requests * (8 + 8 * count))
