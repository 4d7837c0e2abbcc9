"""The table from requests to draft K/V entries, built once per step for all layers of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.attention.visibility import context_positions
from sglang_dflash.drafting.kv import Tags

# The target slot of tokens that are not to be read: rows of padding, and positions that have no
# slot. A KV pool keeps it for padding.
PADDING_SLOT = 0
# Columns times requests that `fill_context_table` works on at once, in some 60 bytes for each.
PIECE = 1 << 16


class RequestSlots(NamedTuple):
    """The slots of the committed tokens of R requests in the target's KV pool.

    Attributes:
        req_to_token: int32 `[rows, positions]`, the target slots of each row's positions, with unit
            stride over positions. Values past a request's tokens are not used.
        rows: int64 `[R]`, the requests' rows of `req_to_token`.
        seq_lens: int64 `[R]`, committed tokens: the position of the block's first token.
        longest: a bound on `seq_lens` that is known on the host.
    """

    req_to_token: Tensor
    rows: Tensor
    seq_lens: Tensor
    longest: int

    def columns(self, reach: Reach) -> int:
        """Columns of the requests' table: what the longest request reads."""
        return reach.tokens_read(min(self.longest, self.req_to_token.shape[1]))


class ContextTable(NamedTuple):
    """The entries of the draft KV cache that the block of each request reads. Column c stands for
    the position that `context_positions` gives it.

    Attributes:
        entries: int32 `[R, C]`, entry numbers; -1 if there is no such token or its K/V is missing.
        seq_lens: int64 `[R]`, committed tokens.
    """

    entries: Tensor
    seq_lens: Tensor


def fill_context_table(
    entries: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    reach: Reach,
    tags: Tags | None,
) -> None:
    """Fill the `entries` of a `ContextTable`, and mark in `tags` that they are in use. In torch.

    Args:
        entries: int32 `[R, C]`, written (see `ContextTable`). C is at least `reach.tokens_read` of
            the longest request.
        req_to_token: int `[rows, positions]`, see `RequestSlots`.
        rows: int `[R]`.
        seq_lens: int `[R]`.
        reach: what the drafts read.
        tags: of the cache; None if every slot's token has draft K/V (`DraftKVCache` without tags).
            The padding entry is never in use.
    """
    last = req_to_token.shape[1] - 1
    ends = seq_lens.clamp(max=last + 1)[:, None]
    if tags is not None:
        tags.in_use.zero_()
    for first, width in pieces(entries.shape[1], PIECE // max(1, len(entries))):
        positions = context_positions(seq_lens.long(), width, reach, first)
        visible = positions < ends
        piece = req_to_token[rows[:, None], positions.clamp(max=last)].where(visible, PADDING_SLOT)
        if tags is not None:
            slots, piece = piece, tags.entry_of[piece]
            visible &= tags.owner[piece] == slots
            used = piece.where(visible, len(tags.in_use) - 1)
            tags.in_use.index_fill_(0, used.flatten().long(), True)
        entries[:, first : first + width] = piece.where(visible, -1)
    if tags is not None:
        tags.in_use[-1:].fill_(False)


def pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Beginning and width of pieces of at most `size` (at least 1) that make up `total`."""
    size = max(1, size)
    return ((first, min(size, total - first)) for first in range(0, total, size))
