"""Draft heads: what turns the draft's hidden states into drafted tokens.

A head is one file here and one line in `make_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang_dflash.drafting.heads.argmax import ArgmaxHead
from sglang_dflash.drafting.model import DraftModel


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


class DraftHead(Protocol):
    """Attributes:
    capturable: whether a call can be recorded: it reads nothing on the host.
    """

    capturable: bool

    def __call__(self, hidden: Tensor) -> Tensor:
        """Draft tokens.

        Args:
            hidden: `[R, B, E]`, the draft's hidden states; the first ones are the bonus tokens'.

        Returns:
            Ids int64 `[R, B - 1]`; -1 where the draft computed nothing finite.
        """


def make_head(model: DraftModel, target: TargetHead) -> DraftHead:
    """The head that the draft was trained with. `DraftConfig` refuses all but DFlash v1."""
    return ArgmaxHead(target.logits, target.first_id, model.tp)
