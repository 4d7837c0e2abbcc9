"""Tensor parallelism as a value: the core is told its rank and how to reduce, and knows no process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.checkpoint.errors import ConfigError


def _identity(x: Tensor) -> Tensor:
    return x


def _alone(x: Tensor) -> Tensor:
    return x[None]


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of the group, the sum over it, and all ranks' tensors `[...]` as `[size, ...]`. The default is one rank."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _identity
    all_gather: Callable[[Tensor], Tensor] = _alone

    def share(self, name: str, total: int) -> int:
        """This rank's part of `total` heads or columns; raises ConfigError where it does not divide."""
        if total % self.size:
            raise ConfigError(
                f"--tp-size: {self.size} does not divide the draft's {name} ({total})"
            )
        return total // self.size

    def share_or_copy(self, name: str, total: int) -> int:
        """As `share`, but where there are fewer than ranks each goes to several, as key and value heads do."""
        if self.size > total and self.size % total == 0:
            return 1
        return self.share(name, total)


def argmax_of_shards(logits: Tensor, first_id: int, tp: TensorParallel) -> Tensor:
    """Ids int64 `[N]` of the largest logits of a vocabulary split over ranks; the lowest rank's where they are equal.

    Args:
        logits: `[N, V / size]`, this rank's part, which begins at `first_id`.
    """
    if tp.size == 1:
        return logits.argmax(-1) + first_id
    value, index = logits.max(-1)
    # Ids are exact in float32, below 2 ** 24: value and id travel together.
    candidates = tp.all_gather(torch.stack((value.float(), (index + first_id).float())))
    best = candidates[:, 0].argmax(0, keepdim=True)
    return candidates[:, 1].gather(0, best)[0].long()
