"""Attention of a drafted block over its context and itself: what may be seen, and the ops that compute it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.checkpoint.errors import ConfigError

# (q [R, B, H, D], k [R, C + B, G, D], v [R, C + B, G, D], mask bool [R, 1 or B, C + B]) -> [R, B, H, D]
BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def torch_block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The reference: softmax(q k^T / sqrt(D)) v in torch. Query heads of one kv head become its rows, so no K is repeated."""
    heads, kv_heads = q.shape[2], k.shape[2]
    groups, block = heads // kv_heads, q.shape[1]
    rows = (
        q.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )  # [R, G, g * B, D]
    if mask.shape[1] > 1:
        mask = mask.repeat(1, groups, 1)
    out = F.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), mask[:, None].expand(-1, -1, rows.shape[2], -1)
    )
    return out.unflatten(2, (groups, block)).permute(0, 3, 1, 2, 4).flatten(2, 3)


ATTENTION_OPS: dict[str, BlockAttention] = {"torch": torch_block_attention}


def block_attention(name: str) -> BlockAttention:
    """The op of that name; raises ConfigError with the list of known names."""
    if name not in ATTENTION_OPS:
        raise ConfigError(
            f"draft attention: {name!r} is not known; choose one of {sorted(ATTENTION_OPS)}"
        )
    return ATTENTION_OPS[name]


def context_positions(seq_lens: Tensor, width: int, window: int | None, sinks: int) -> Tensor:
    """Which positions the block of each request reads: the first `sinks` and the last `window` of its committed tokens.

    Args:
        seq_lens: int64 `[R]`, committed tokens.
        width: columns to fill, at most `window + sinks`; enough for the longest request.

    Returns:
        int64 `[R, width]`; a column past the request's own tokens holds a position >= its seq_len.
    """
    column = torch.arange(width, device=seq_lens.device)
    if window is None:
        return column.expand(len(seq_lens), -1)
    tail = (seq_lens - window).clamp(min=sinks)[:, None]
    return torch.where(column < sinks, column, tail + column - sinks)


def visibility(
    layer: LayerAttention, positions: Tensor, seq_lens: Tensor, live: Tensor, block: int
) -> Tensor:
    """Bool mask `[R, 1 or B, C + B]` of what each block position of a layer sees.

    Args:
        positions: int64 `[R, C]`, the context's (see `context_positions`).
        live: bool `[R, C]`, whether there is such a token and the cache still holds it.
    """
    seen = live[:, None]  # [R, 1, C]
    step = torch.arange(block, device=seq_lens.device)
    inside = torch.ones(1, 1, block, dtype=torch.bool, device=seq_lens.device)
    if layer.causal or layer.sliding_window is not None:
        behind = step[:, None] - step  # how far each key of the block lies behind the query
        inside = (behind >= 0) if layer.causal else torch.ones_like(behind, dtype=torch.bool)
        if layer.sliding_window is not None:
            inside = inside & (behind < layer.sliding_window)
            query = (seq_lens[:, None] + step)[..., None]  # [R, B, 1]
            seen = seen & (query - positions[:, None] < layer.sliding_window)
        inside = inside[None]
    rows = max(seen.shape[1], inside.shape[1])
    return torch.cat((seen.expand(-1, rows, -1), inside.expand(len(seen), rows, -1)), dim=-1)
