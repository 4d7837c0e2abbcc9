"""A step recorded once and replayed on the same buffers, as a CUDA graph is, on any device.

`OpRecorder` keeps the flat list of torch operations of one run. A replay executes them on the same
tensors: what Python computed from a value during the recording is frozen, as in a captured graph.
That makes it the proof, without a GPU, that a step can be captured: it finds reads of the device
on the host, shapes that depend on values, and lengths that were baked in. Triton kernels do not
pass through torch's dispatcher and are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class RecordingError(RuntimeError):
    """A run that needs the host: it reads a value of the device, or a shape depends on one."""


# Operations that a captured graph cannot have, and what is wrong with them.
_FORBIDDEN = {
    "aten::_local_scalar_dense": "reads a value of the device on the host",
    "aten::equal": "reads a value of the device on the host",
    "aten::is_nonzero": "reads a value of the device on the host",
    "aten::lift_fresh": "copies a host value to the device",
    "aten::lift_fresh_copy": "copies a host value to the device",
    "aten::nonzero": "has a shape that depends on values",
    "aten::masked_select": "has a shape that depends on values",
    "aten::_unique2": "has a shape that depends on values",
    "aten::repeat_interleave": "has a shape that depends on values",
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class _Made(NamedTuple):
    """The place of a tensor that an operation of the recording made."""

    place: int


class _Op(NamedTuple):
    """One operation: its inputs, flat, with `_Made` for results of earlier ones; and the places of
    its results."""

    func: Callable[..., Any]
    inputs: list[Any]
    spec: TreeSpec
    outputs: list[int]


class OpRecorder:
    """A `sglang_dflash.drafting.graphs.Recorder` by torch's dispatcher."""

    def record(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [self.record_one(run) for run in runs]

    def record_one(self, run: Callable[[], None]) -> Recording:
        # What a first run caches is not part of the recording.
        run()
        listing = _Listing()
        with listing:
            run()
        return Recording(listing.ops)


class Recording:
    """A run recorded by `OpRecorder`: calling it repeats the run."""

    def __init__(self, ops: list[_Op]) -> None:
        self.ops = ops

    @torch.no_grad()
    def __call__(self) -> None:
        made: dict[int, Tensor] = {}
        for func, inputs, spec, outputs in self.ops:
            flat = [made[x.place] if isinstance(x, _Made) else x for x in inputs]
            args, kwargs = tree_unflatten(flat, spec)
            results = _tensors(func(*args, **kwargs))
            made.update(zip(outputs, results, strict=True))


class _Listing(TorchDispatchMode):
    """Executes operations and lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        # Results stay alive, so that no other tensor gets their id.
        self._results: list[Tensor] = []
        self._index: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        _check(func._schema.name, flat)
        inputs = [self._reference(x) for x in flat]
        out = func(*args, **(kwargs or {}))
        self.ops.append(_Op(func, inputs, spec, [self._keep(x) for x in _tensors(out)]))
        return out

    def _reference(self, x: Any) -> Any:
        known = isinstance(x, Tensor) and id(x) in self._index
        return _Made(self._index[id(x)]) if known else x

    def _keep(self, result: Tensor) -> int:
        index = len(self._results)
        self._results.append(result)
        self._index[id(result)] = index
        return index


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def _check(name: str, inputs: list[Any]) -> None:
    reason = _FORBIDDEN.get(name)
    if name in _INDEXING and any(
        isinstance(x, Tensor) and x.dtype == torch.bool for x in inputs[1:]
    ):
        reason = "indexes by a mask: its shape depends on values"
    if reason is not None:
        raise RecordingError(f"{name} {reason}")
