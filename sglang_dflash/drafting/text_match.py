"""The search of a request's text for its newest tokens: what followed them is a draft that needs no
forward.

Letters in shapes: R requests, C positions of the longest request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots

# Newest tokens that are compared, at most.
LONGEST_MATCH = 16
# Matches of fewer tokens are not used.
SHORTEST_MATCH = 2
# What stands before a text.
_NOT_THERE = -(2**31)


def find_match(
    bonus: Tensor, texts: Tensor, requests: RequestSlots, count: int
) -> tuple[Tensor, Tensor]:
    """The longest match of the newest tokens, and the `count` tokens after it. Of the earlier
    places in a request's text, the one that agrees with the end of the text in the most tokens is
    the match, the latest of several. A text that repeats its end goes on so.

    For a CPU: the host reads how many places are compared.

    Args:
        bonus: int64 `[R]`, newest tokens.
        texts: int32 `[rows, positions]`, the tokens of each row's request. What it holds from
            `seq_lens` on is not read.
        requests: the bonus tokens' positions are their `seq_lens`.

    Returns:
        The number of tokens that agree, int64 `[R]`, up to `LONGEST_MATCH`; and the tokens that
        followed, int64 `[R, count]`. If fewer than `SHORTEST_MATCH` agree, the number says so, and
        the tokens mean nothing.
    """
    seq_lens, device = requests.seq_lens[:, None], bonus.device
    columns = min(requests.longest, texts.shape[1] - 1) + 1
    text = texts[requests.rows, :columns].scatter_(1, seq_lens, bonus[:, None].int())  # [R, C]
    agrees = (text == bonus[:, None]) & (torch.arange(columns, device=device) < seq_lens)
    before = text.gather(1, (seq_lens - 1).clamp(min=0))
    agrees = agrees[:, 1:] & (text[:, :-1] == before)
    row, ends = agrees.nonzero(as_tuple=True)  # [M]: places where the newest two tokens stood
    if not len(row):
        return torch.zeros_like(bonus), bonus[:, None].expand(-1, count)
    ends = ends + 1
    up_to = F.pad(text, (LONGEST_MATCH - 1, 0), value=_NOT_THERE).unfold(1, LONGEST_MATCH, 1)
    newest = up_to[row, requests.seq_lens[row]]
    counts = (up_to[row, ends] == newest).flip(1).cumprod(1).sum(1)
    key = seq_lens.new_zeros(len(bonus)).scatter_reduce_(0, row, counts * columns + ends, "amax")
    lengths, end = key // columns, key[:, None] % columns
    period = (seq_lens - end).clamp(min=1)
    after = end + 1 + torch.arange(count, device=device) % period
    return lengths, text.gather(1, after).long()
