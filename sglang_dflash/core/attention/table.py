"""The table from requests to draft K/V entries, built once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ContextTable:
    """What the block of each request reads of the draft KV cache.

    Attributes:
        entries: int64 `[R, C]`, entry numbers; any valid number where not live.
        live: bool `[R, C]`, whether the entry is to be read.
        positions: int64 `[R, C]`, the tokens' positions.
        seq_lens: int64 `[R]`, committed tokens: the position of the block's first token.
    """

    entries: Tensor
    live: Tensor
    positions: Tensor
    seq_lens: Tensor
