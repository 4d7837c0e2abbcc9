"""Launches of kernels that are made of torch code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_gpu.capture import mapped, tensors_in
from tests.fake_gpu.gpu import GPU
from tests.fake_gpu.tensor import CudaTensor


def host_of(value: Any) -> Any:
    """The host tensor inside a tensor of the GPU; anything else as it is."""
    return value.host if isinstance(value, CudaTensor) else value


def kernel(run: Callable[..., Any]) -> Callable[..., None]:
    """A compiled kernel made of torch code, which gets the host tensors inside and writes into
    them. A capture holds the launch, not its operations."""

    def launch(*args: Any, **kwargs: Any) -> None:
        for x in tensors_in((args, kwargs)):
            if not isinstance(x, CudaTensor) and x.ndim:
                raise RuntimeError(f"kernel {run} got a tensor of the host, {tuple(x.shape)}")
        launched(run.__name__, run, args, kwargs)

    return launch


def launched(name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run a kernel on the host tensors inside, or note its launch in the capture."""

    def go(*args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        with _disable_current_modes(), torch.no_grad():
            run(*args, **kwargs)
        GPU.launched(name, time.perf_counter() - begun)

    args, kwargs = mapped(host_of, args), mapped(host_of, kwargs)
    if GPU.capture is None:
        go(*args, **kwargs)
    else:
        GPU.capture.launch(go, args, kwargs)


def function(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that launches kernels and returns tensors, made of torch code that gets the host
    tensors inside. A capture holds the call; what it returns then is not filled before a replay."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {id(x.host): x for x in tensors_in((args, kwargs)) if isinstance(x, CudaTensor)}
        inside = mapped(host_of, (args, kwargs))

        def go() -> Any:
            with _disable_current_modes(), torch.no_grad():
                return run(*inside[0], **inside[1])

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            wrapper = given.get(id(value))
            return CudaTensor(value) if wrapper is None else wrapper

        if GPU.capture is None:
            return mapped(wrapped, go())
        # What it writes is put back: a capture runs nothing.
        storages = {s.data_ptr(): s for s in (x.untyped_storage() for x in given.values())}
        before = {address: storage.clone() for address, storage in storages.items()}
        results = go()
        for address, storage in storages.items():
            storage.copy_(before[address])
        new = [x for x in tensors_in(results) if id(x) not in given]

        def again() -> None:
            filled = [x for x in tensors_in(go()) if id(x) not in given]
            for kept, values in zip(new, filled, strict=True):
                kept.copy_(values)

        GPU.capture.launch(again, (), {})
        return mapped(wrapped, results)

    return call
