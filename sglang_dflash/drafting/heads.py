"""Draft heads: what turns the draft's hidden states into drafted tokens.

A head is a class here and a line in `make_head`. Its calls are recorded in CUDA graphs: they read
nothing on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import RULES, BlockNoise
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.parallel import TensorParallel, argmax_of_shards, largest_of_ranks


class DraftHead(Protocol):
    """Hidden states `[R, B, E]`, the first ones the bonus tokens', to drafted tokens."""

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        """Draft what follows the bonus tokens int64 `[R]`.

        Returns:
            Ids int64, -1 where the draft computed nothing finite. Without noise `[R, B - 1]`, the
            likeliest tokens. With noise `[2, R, B - 1]`: the likeliest tokens, and the coupled ones
            (`noise.RULES`).
        """

    def shortfall(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """By how much other tokens, int64 `[R, B - 1]`, are less likely than the ones that
        `__call__` takes: float32 `[R, B - 1]`, as a share of the largest score. For checks."""


@dataclass(frozen=True)
class TargetHead:
    """What the drafter borrows of the target.

    Attributes:
        embed: ids int64 `[N]` -> embeddings `[N, E]`.
        logits: hidden states `[N, E]` -> `[N, V / ranks]`, this rank's part of the vocabulary.
        first_id: the token id of their first column.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    first_id: int = 0


@dataclass(frozen=True)
class ArgmaxHead:
    """The head of DFlash v1: the token of the target's largest logit, at every position."""

    target: TargetHead
    tp: TensorParallel
    ops: TorchOps

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        logits, first_id = self.target.logits(hidden[:, 1:].flatten(0, 1)), self.target.first_id
        if noise is None:
            drafted = argmax_of_shards(logits, first_id, self.tp)
            return drafted.unflatten(0, (len(hidden), -1))
        best, ids = self.ops.largest(logits, noise, first_id)
        drafted = largest_of_ranks(best.flatten(), ids.flatten(), self.tp)
        return drafted.view(len(RULES), len(hidden), -1)

    def shortfall(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits = self.target.logits(hidden[:, 1:].flatten(0, 1)).float()
        columns = ids.flatten() - self.target.first_id
        there = (columns >= 0) & (columns < logits.shape[1])
        own = logits.gather(1, columns.where(there, 0)[:, None])[:, 0]
        parts = (own.where(there, -torch.inf), logits.amax(1), logits.abs().amax(1))
        own, best, scale = self.tp.all_gather(torch.stack(parts)).amax(0)
        return ((best - own) / scale.amax()).view(ids.shape)


def make_head(model: DraftModel, target: TargetHead) -> DraftHead:
    """The head that the draft was trained with. `DraftConfig` refuses all but DFlash v1."""
    return ArgmaxHead(target, model.tp, model.ops)
