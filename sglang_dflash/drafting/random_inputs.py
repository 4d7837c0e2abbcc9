"""Inputs of operations that a check compares with torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.ops import TorchOps

# The operations of a network -> the results of one of them to compare.
Case = Callable[[TorchOps], Sequence[Tensor]]
Cases = dict[str, Case]


class RandomInputs:
    """Random values on the device and in the dtype of a tensor or network, always the same ones."""

    def __init__(self, like: Any) -> None:
        self.device, self.dtype = like.device, like.dtype
        # On the host, so that every device gets the same values.
        self._generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)
