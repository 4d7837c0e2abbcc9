"""The head of DFlash v1: the token of the target's largest logit, at every position."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglang_dflash.drafting.parallel import TensorParallel, argmax_of_shards


class ArgmaxHead:
    """A `DraftHead`."""

    capturable = True

    def __init__(
        self, logits: Callable[[Tensor], Tensor], first_id: int, tp: TensorParallel
    ) -> None:
        """`logits`, `first_id`: the target's, see `TargetHead`."""
        self._logits, self._first_id, self._tp = logits, first_id, tp

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._logits(hidden[:, 1:].flatten(0, 1))
        drafted = argmax_of_shards(logits, self._first_id, self._tp)
        return drafted.unflatten(0, (len(hidden), -1))
