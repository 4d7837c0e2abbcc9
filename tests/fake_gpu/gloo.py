"""Communication of ranks on faked GPUs, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


class GlooCommunicator:
    """Stand-in for SGLang's `PyNcclCommunicator`, which graphs are captured with."""

    available = True

    def __init__(self, group: Any, device: Any, **_: Any) -> None:
        self.group, self.device, self.disabled = group, device, True
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @contextmanager
    def change_state(self, enable: bool | None = None, stream: Any = None) -> Iterator[None]:
        before, self.disabled = self.disabled, not enable
        yield
        self.disabled = before

    def all_reduce(self, tensor: Tensor, **_: Any) -> None:
        dist.all_reduce(tensor, group=self.group)

    def outplace_all_reduce(self, tensor: Tensor, **_: Any) -> Tensor:
        total = tensor.clone()
        self.all_reduce(total)
        return total

    def all_gather(self, output: Tensor, tensor: Tensor, **_: Any) -> None:
        dist.all_gather_into_tensor(output, tensor, group=self.group)

    def broadcast(self, tensor: Tensor, src: int, **_: Any) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self.group, src), group=self.group)
