"""CUDA graphs of the faked GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_gpu.capture import tensors_in
from tests.fake_gpu.gpu import GPU
from tests.fake_gpu.streams import InStream, Stream


class CUDAGraph:
    """The operations and launches of a capture; a replay runs them on the memory of the capture."""

    def __new__(cls, *args: Any, **kwargs: Any) -> CUDAGraph:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Function, arguments, and where its new results go.
        self.steps: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def record(self, func: Any, args: Any, kwargs: Any, result: Any, run: Any) -> None:
        """Note an operation, which `run` runs again. A view has nothing to run."""
        if func.is_view:
            return
        written = any(r.alias_info is not None for r in func._schema.returns)
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        results = [
            None if x.untyped_storage().data_ptr() in given else x
            for x in ([] if written else tensors_in(result))
        ]
        self.steps.append((run, args, kwargs, results))

    def launch(self, run: Any, args: Any, kwargs: Any) -> None:
        self.steps.append((run, args, kwargs, []))

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        GPU.capture = self

    def capture_end(self) -> None:
        GPU.capture = None

    def replay(self) -> None:
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, results in self.steps:
                again = func(*args, **kwargs)
                if results:
                    for kept, new in zip(results, tensors_in(again), strict=True):
                        if kept is not None:
                            kept.copy_(new)

    def reset(self) -> None:
        self.steps.clear()

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def instantiate(self) -> None:
        """Nothing to prepare."""

    def enable_debug_mode(self) -> None:
        """Nothing to dump."""

    def raw_cuda_graph(self) -> int:
        return 0


class Capturing:
    """`torch.cuda.graph`."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any
    ) -> None:
        self.graph, self.stream = cuda_graph, InStream(stream or Stream())

    def __enter__(self) -> None:
        self.stream.__enter__()
        self.graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self.graph.capture_end()
        self.stream.__exit__(*error)
