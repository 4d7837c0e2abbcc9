"""Draft heads: what turns the draft's hidden states into drafted tokens.

A head is a class here and a line in `make_head`. Its calls are recorded in CUDA graphs: they read
nothing on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.parallel import TensorParallel, argmax_of_shards

# Hidden states [R, B, E], the first ones the bonus tokens' -> ids int64 [R, B - 1], -1 where the
# draft computed nothing finite.
DraftHead = Callable[[Tensor], Tensor]


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

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.target.logits(hidden[:, 1:].flatten(0, 1))
        drafted = argmax_of_shards(logits, self.target.first_id, self.tp)
        return drafted.unflatten(0, (len(hidden), -1))


def make_head(model: DraftModel, target: TargetHead) -> DraftHead:
    """The head that the draft was trained with. `DraftConfig` refuses all but DFlash v1."""
    return ArgmaxHead(target, model.tp)
