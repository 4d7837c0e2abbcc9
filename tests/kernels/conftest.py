"""Without a GPU, kernels run in Triton's interpreter (tests/conftest.py chooses it)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.interpreter import replacements


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the interpreter, and correct operations of Triton 3.8's.

    It multiplies bfloat16 as integers, numbers and matrices, cuts bits off where a GPU rounds
    float32 to bfloat16, and loses the carry into the exponent where it rounds float32 to float8.
    """
    if torch.cuda.is_available():
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for owner, name, faster in replacements():
        monkeypatch.setattr(owner, name, faster)
    dot, convert = InterpreterBuilder.create_dot, interpreter._convert_float
    multiply = InterpreterBuilder.create_fmul

    def product(self, a, b):
        if a.dtype.scalar != tl.bfloat16:
            return multiply(self, a, b)
        exact = multiply(self, _as_float32(a), _as_float32(b)).data
        return TensorHandle(rounded(exact, tl.float32, tl.bfloat16, None), tl.bfloat16)

    def dot_of_values(self, a, b, *rest):
        return dot(self, _as_float32(a), _as_float32(b), *rest)

    def rounded(values, source, to, mode):
        if source != tl.float32 or to not in ROUNDED:
            return convert(values, source, to, mode)
        result = torch.from_numpy(np.ascontiguousarray(values)).to(ROUNDED[to])
        bits = torch.uint8 if result.element_size() == 1 else torch.uint16
        return result.view(bits).numpy()

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_of_values)
    monkeypatch.setattr(InterpreterBuilder, "create_fmul", product)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)


ROUNDED = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def _as_float32(handle: TensorHandle) -> TensorHandle:
    """bfloat16 values as float32, other dtypes as they are."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
