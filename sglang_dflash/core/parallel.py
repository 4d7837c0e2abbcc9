"""Tensor parallelism as a value: the core is told its rank and how to reduce, and knows no process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sglang_dflash.config import ConfigError


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of the group, and the sum over it. The default is one rank, on which the sum is the identity."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _identity

    def share(self, name: str, total: int) -> int:
        """This rank's part of `total` heads or columns; raises ConfigError where it does not divide."""
        if total % self.size:
            raise ConfigError(f"--tp-size: {self.size} does not divide the draft's {name} ({total})")
        return total // self.size
