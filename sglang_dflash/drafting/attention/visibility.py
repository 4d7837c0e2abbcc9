"""The context and block positions that each position of a block sees.
`dflash_kernels.context_table` and `dflash_kernels.block_attention` apply the same rules inside of
kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention, Reach


def context_positions(seq_lens: Tensor, width: int, reach: Reach, first: int = 0) -> Tensor:
    """Return the committed positions that the block of each request reads.

    Args:
        seq_lens: int64 `[R]`, committed tokens.
        width: columns to fill. All columns are `reach.tokens_read` of the longest request, or more.
        first: the first of these columns.

    Returns:
        int64 `[R, width]`; a column past the request's own tokens holds a position >= its seq_len.
    """
    column = torch.arange(first, first + width, device=seq_lens.device)
    if not reach.is_bounded:
        return column.expand(len(seq_lens), -1)
    tail = reach.tail(seq_lens).clamp(min=reach.sinks)[:, None]
    return torch.where(column < reach.sinks, column, tail + column - reach.sinks)


def ever_visible(positions: Tensor, lengths: Tensor, reach: Reach) -> Tensor:
    """Return whether any block of a request can see a token of its prompt.

    Args:
        positions: int64 `[N]`.
        lengths: int64 `[N]`, tokens of the token's request before its first draft.

    Returns:
        bool `[N]`.
    """
    if not reach.is_bounded:
        return torch.ones_like(positions, dtype=torch.bool)
    return (positions >= reach.tail(lengths)) | (positions < reach.sinks)


def keys_around(layer: LayerAttention) -> tuple[int | None, int | None]:
    """Keys before and after a query that it sees, None for all: the `window_size` of
    FlashAttention. `causal` without a sliding window is a flag of its own there."""
    if layer.sliding_window is None:
        return None, None
    return layer.sliding_window - 1, 0 if layer.causal else None


def visibility(
    layer: LayerAttention, positions: Tensor, seq_lens: Tensor, live: Tensor, block: int
) -> Tensor:
    """Bool mask `[R, 1 or B, C + B]` of what each block position sees in a layer.

    Args:
        positions: int64 `[R, C]`, the context's (see `context_positions`).
        seq_lens: int64 `[R]`, committed tokens.
        live: bool `[R, C]`, whether there is such a token and the cache holds it.
        block: B.
    """
    context = live[:, None]  # [R, 1, C]
    step = torch.arange(block, device=seq_lens.device)
    inside = torch.ones(1, 1, block, dtype=torch.bool, device=seq_lens.device)
    if layer.causal or layer.sliding_window is not None:
        behind = step[:, None] - step  # how far each key of the block lies behind the query
        inside = (behind >= 0) if layer.causal else torch.ones_like(behind, dtype=torch.bool)
        if layer.sliding_window is not None:
            inside = inside & (behind < layer.sliding_window)
            query = (seq_lens[:, None] + step)[..., None]  # [R, B, 1]
            context = context & (query - positions[:, None] < layer.sliding_window)
        inside = inside[None]
    rows = max(context.shape[1], inside.shape[1])
    return torch.cat((context.expand(-1, rows, -1), inside.expand(len(context), rows, -1)), dim=-1)
