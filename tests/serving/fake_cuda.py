"""A GPU that is not there: tensors on it have shapes but no values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Reads a value of the device on the host.
READS = ("_local_scalar_dense", "equal", "nonzero", "unique")
# These take a host scalar as an argument of their launch.
SCALARS = ("fill", "where", "add", "mul", "sub", "div", "eq", "lt", "ge")


class Crossing(NamedTuple):
    """An operation that moves values between host and device.

    Attributes:
        name: of the operation.
        waits: whether the host waits for what the device still has to do.
    """

    name: str
    waits: bool


class FakeCuda(TorchDispatchMode):
    """Within it, tensors on `cuda` are fake and those on the host are real.

    What depends on values of the device raises. `crossings` are the operations that copy between
    host and device. Host memory counts as pinned if it is in `pinned`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[Crossing] = []
        self.pinned: set[int] = set()
        self._fake = FakeTensorMode()

    def __enter__(self) -> Any:
        # Below this mode: it also keeps torch from looking for a GPU.
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def pin(self, host: Tensor) -> Tensor:
        """Stand-in for `Tensor.pin_memory`."""
        self.pinned.add(host.data_ptr())
        return host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made_there = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not made_there and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self._note(func, tensors, args, kwargs)

        def fake(x: Any) -> Any:
            real = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            return self._fake.from_tensor(x) if real else x

        args, kwargs = tree_map(fake, (args, kwargs))
        return func(*args, **kwargs)

    def _note(
        self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        host = [x for x in tensors if not isinstance(x, FakeTensor)]
        to_host = torch.device(kwargs.get("device") or "cuda").type == "cpu"
        if host and not (name.rstrip("_") in SCALARS and all(x.ndim == 0 for x in host)):
            pinned = all(x.data_ptr() in self.pinned for x in host)
            # `copy_` has it as its third argument.
            asynchronous = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            self.crossings.append(Crossing(name, not (pinned and asynchronous)))
        elif to_host or name.rstrip("_") in READS:
            self.crossings.append(Crossing(name, True))
