"""Blocks that continue what a request has already seen.

The tokens of every running request stand in a table on the device. In each step its newest ones are
looked up among its earlier ones; what followed there is a draft that costs no forward.

Letters in shapes: R requests, B block positions, C positions of the longest request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots

# Newest tokens that are compared, at most.
LONGEST_MATCH = 16
# A match of so many tokens replaces the draft.
LONG_MATCH = 3
# So does one of at least two tokens if the draft begins as it goes on.
SHORT_MATCH = 2
# What stands before a text.
_NOT_THERE = -(2**31)


def continue_seen(block: Tensor, texts: Tensor, requests: RequestSlots, vocab_size: int) -> Tensor:
    """Replace drafts by what followed the newest tokens of a request where they stood before.

    Of the earlier places in a request's text, the one that agrees with the end of the text in the
    most tokens is taken, the latest of several.

    Args:
        block: int64 `[R, B]`, bonus tokens and drafts; the drafts are overwritten.
        texts: int32 `[rows, positions]`, the tokens of each row's request. What it holds from
            `seq_lens` on is not read.
        requests: the bonus tokens' positions are their `seq_lens`.
        vocab_size: tokens from there on, of images, are not proposed.

    Returns:
        bool `[R]`: whose drafts are replaced.
    """
    lengths, seen = seen_before(block[:, :1], texts, requests, block.shape[1] - 1)
    agrees = seen[:, :1] == block[:, 1:2]
    taken = (lengths >= LONG_MATCH) | ((lengths >= SHORT_MATCH) & agrees)
    is_token = (seen >= 0) & (seen < vocab_size)
    block[:, 1:] = seen.where(taken & is_token, block[:, 1:])
    return taken[:, 0]


def seen_before(
    bonus: Tensor, texts: Tensor, requests: RequestSlots, count: int
) -> tuple[Tensor, Tensor]:
    """The longest match of the newest tokens, and the `count` tokens after it. A text that repeats
    its end goes on so.

    For a CPU: how many places are compared is read on the host.

    Args:
        bonus: int64 `[R, 1]`, newest tokens.
        texts, requests: see `continue_seen`.

    Returns:
        How many tokens agree, int64 `[R, 1]`, up to `LONGEST_MATCH`, 0 for fewer than
        `SHORT_MATCH`; and what followed, int64 `[R, count]`, anything where none do.
    """
    seq_lens, device = requests.seq_lens[:, None], bonus.device
    columns = min(requests.longest, texts.shape[1] - 1) + 1
    text = texts[requests.rows, :columns].scatter_(1, seq_lens, bonus.int())  # [R, C]
    agrees = (text == bonus) & (torch.arange(columns, device=device) < seq_lens)
    before = text.gather(1, (seq_lens - 1).clamp(min=0))
    agrees = agrees[:, 1:] & (text[:, :-1] == before)
    of, ends = agrees.nonzero(as_tuple=True)  # [M]: places where the newest two tokens stood
    if not len(of):
        return torch.zeros_like(bonus), bonus.expand(-1, count)
    ends = ends + 1
    up_to = F.pad(text, (LONGEST_MATCH - 1, 0), value=_NOT_THERE).unfold(1, LONGEST_MATCH, 1)
    newest = up_to[of, requests.seq_lens[of]]
    counts = (up_to[of, ends] == newest).flip(1).cumprod(1).sum(1)
    key = seq_lens.new_zeros(len(bonus)).scatter_reduce_(0, of, counts * columns + ends, "amax")
    lengths, end = key[:, None] // columns, key[:, None] % columns
    period = (seq_lens - end).clamp(min=1)
    after = end + 1 + torch.arange(count, device=device) % period
    return lengths, text.gather(1, after).long()
