"""The processes of a benchmark: one, or those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from sglang_dflash.facts.errors import ConfigError

T = TypeVar("T")


class Group(Protocol):
    """This process among the others. `local_rank` counts those of this machine."""

    rank: int
    size: int
    local_rank: int

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on all ranks. Raises its ConfigError on all of them."""

    def gather(self, items: list[T]) -> list[T] | None:
        """The items of all ranks on rank 0; None elsewhere."""


class OneProcess:
    """A run without torchrun."""

    rank, size, local_rank = 0, 1, 0

    def from_first(self, make: Callable[[], T]) -> T:
        return make()

    def gather(self, items: list[T]) -> list[T] | None:
        return items


class Torchrun:
    """The processes that torchrun has started. They exchange objects by gloo, on any device."""

    def __init__(self) -> None:
        from torch import distributed

        self._distributed: Any = distributed
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])

    def from_first(self, make: Callable[[], T]) -> T:
        shared: list[Any] = [None]
        if self.rank == 0:
            try:
                shared = [make()]
            except ConfigError as error:
                # The other ranks wait for an answer.
                shared = [error]
        self._distributed.broadcast_object_list(shared, src=0)
        if isinstance(shared[0], ConfigError):
            raise shared[0]
        return shared[0]

    def gather(self, items: list[T]) -> list[T] | None:
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._distributed.gather_object(items, found, dst=0)
        return None if found is None else [item for many in found for item in many]


@contextmanager
def joined() -> Iterator[Group]:
    """The processes of this run, by the variables that torchrun sets."""
    if "RANK" not in os.environ:
        yield OneProcess()
        return
    from torch import distributed

    distributed.init_process_group(backend="gloo")
    try:
        yield Torchrun()
    finally:
        distributed.destroy_process_group()
