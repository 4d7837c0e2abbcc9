"""The interface of a draft head: what turns the draft's hidden states into drafted tokens.

Letters in shapes: R requests, B block positions, E hidden size, V tokens, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_dflash.drafting.noise import BlockNoise, SampledBlocks

# (output of a sublayer, bias to add to it) -> the same, or what stands for it and no bias.
Finish = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
# Input of a sublayer [..., B, E] -> what stands for it, and what finishes the sublayer's output.
Around = Callable[[Tensor], tuple[Tensor, Finish]]


def unchanged(x: Tensor) -> tuple[Tensor, Finish]:
    """Leave a sublayer's input and output as they are. An `Around`."""
    return x, lambda out, bias: (out, bias)


class DraftHead(Protocol):
    """Hidden states `[R, B, E]`, the first ones the bonus tokens', to drafted tokens."""

    def __call__(
        self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None
    ) -> Tensor | SampledBlocks:
        """Draft what follows the bonus tokens int64 `[R]`.

        Returns:
            Without noise ids int64 `[R, B - 1]`, the likeliest tokens; with noise `SampledBlocks`.
            -1 where the draft computed nothing finite.
        """

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        """By how much other tokens, int64 `[R, B - 1]`, are less likely than the ones that
        `__call__` takes, with noise less likely than the coupled ones: float32 `[R, B - 1]`, as a
        share of the largest score. For checks."""


@dataclass(frozen=True)
class TargetHead:
    """The embedding and lm_head that drafts use: the target's, or the draft's own.

    Attributes:
        embed: ids int64 `[N]` -> embeddings `[N, E]`.
        logits: hidden states `[N, E]` -> `[N, V / ranks]`, this rank's part of the vocabulary.
        first_id: the number of this rank's first column.
        token_ids: int64 `[V]`, ascending, the token of each column of all ranks; None if a column's
            number is its token.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    first_id: int = 0
    token_ids: Tensor | None = None

    def tokens(self, columns: Tensor) -> Tensor:
        """The tokens of columns, int64; -1 for -1."""
        if self.token_ids is None:
            return columns
        return self.token_ids[columns].where(columns >= 0, -1)

    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of tokens, int64; -1 for tokens that have none."""
        if self.token_ids is None:
            return tokens
        at = torch.searchsorted(self.token_ids, tokens).clamp(max=len(self.token_ids) - 1)
        return at.where(self.token_ids[at] == tokens, -1)
