"""The bytes of tensors that are alive at once."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that were made within it: those alive, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (self._key(x) in self._users or self._key(x) not in given):
                self._take(x)
        return result

    def _key(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def _take(self, x: Tensor) -> None:
        key, size = self._key(x), x.untyped_storage().nbytes()
        if key not in self._users:
            self._users[key] = 0
            self.alive += size
            self.most = max(self.most, self.alive)
        self._users[key] += 1
        weakref.finalize(x, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.alive -= size
