"""Triton's interpreter as the compiler of the faked GPU."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as extra
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.fake_gpu.gpu import GPU
from tests.fake_gpu.launches import launched
from tests.fake_gpu.tensor import CudaTensor
from tests.interpreter import replacements

PROPERTIES = {
    "multiprocessor_count": 132,
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 5120,
}


def install() -> None:
    """Launches take tensors of the faked GPU. Needs TRITON_INTERPRET before Triton is imported."""
    patch_language_once()
    take_gpu_tensors()
    compute_bfloat16()
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: GPU.index,
        set_current_device=lambda device: None,
        get_current_stream=lambda device=0: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: GPU.device,
        utils=SimpleNamespace(get_device_properties=lambda device=0: PROPERTIES),
        is_active=lambda: True,
        get_benchmarker=lambda: lambda run, quantiles=None, **_: [1.0] * 3,
    )
    triton.runtime.driver.set_active(driver)
    # Programmatic dependent launch: kernels run one after another anyway.
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(extra, name, lambda *args, **kwargs: None)


def take_gpu_tensors() -> None:
    """A launch runs on the tensors inside, or is noted in a capture; one of the host is refused."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        name = getattr(self.fn, "__name__", str(self.fn))
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        for argument, value in named.items():
            if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
                raise ValueError(
                    f"Pointer argument {argument!r} of {name} cannot be accessed from Triton "
                    "(cpu tensor?)"
                )
        launched(name, partial(run_grid, self), args, kwargs)

    interpreter.GridExecutor.__call__ = launch


def run_grid(executor: Any, *args: Any, **kwargs: Any) -> None:
    """All programs of a launch, one after another. The interpreter's own copies every storage that
    a pointer points into, whole pools, before and after."""
    function, builder = executor.fn, interpreter.interpreter_builder
    names = inspect.getfullargspec(function).args
    kwargs = {name: value for name, value in kwargs.items() if name in names}
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    given = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in inspect.getcallargs(function, *args, **kwargs).items()
    }
    grid = tuple(executor.grid(given) if callable(executor.grid) else executor.grid)
    grid += (1,) * (3 - len(grid))
    builder.set_grid_dim(*grid)
    for place in itertools.product(*map(range, grid)):
        builder.set_grid_idx(*place)
        function(**given)


def patch_language_once() -> None:
    """The interpreter replaces all of triton.language for every launch and call of a function."""
    modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(modules)
    interpreter._patch_lang = lambda function: None
    for owner, name, faster in replacements():
        setattr(owner, name, faster)


def is_bfloat16(handle: Any) -> bool:
    return getattr(handle.dtype, "scalar", None) == tl.bfloat16


def widened(handle: Any) -> Any:
    """The values in float32, if they are bfloat16's bits."""
    if is_bfloat16(handle) and handle.data.dtype == np.uint16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def rounded(values: Any) -> Any:
    """The bits of bfloat16: to the nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def handle_of(values: Any) -> Any:
    """A handle of bfloat16, or of the bools that a comparison gives."""
    return TensorHandle(values if values.dtype == np.bool_ else rounded(values), tl.bfloat16)


def in_float32(compute: Callable[..., Any], operands: int) -> Callable[..., Any]:
    """An operation of the interpreter that computes with bfloat16's values."""

    def run(self: Any, *args: Any) -> Any:
        handles, operation = args[:operands], args[operands]
        if not all(map(is_bfloat16, handles)) or operation is np.where:
            return compute(self, *args)
        return handle_of(operation(*map(widened, handles)))

    return run


def compute_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers and computes with those: compute in
    float32 and round, as a GPU does."""
    builder: Any = InterpreterBuilder
    builder.binary_op = in_float32(builder.binary_op, 2)
    builder.unary_op = in_float32(builder.unary_op, 1)
    fma, dot = builder.create_fma, builder.create_dot

    def as_float32(handle: Any) -> Any:
        return TensorHandle(widened(handle), tl.float32) if is_bfloat16(handle) else handle

    def create_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), total, *rest)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if is_bfloat16(z):
            return handle_of(widened(x) * widened(y) + widened(z))
        return fma(self, x, y, z)

    builder.create_dot, builder.create_fma = create_dot, create_fma
    # A constant beside bfloat16, which the interpreter cannot make.
    builder.get_bf16 = lambda self, value: TensorHandle(rounded([value]), tl.bfloat16)
