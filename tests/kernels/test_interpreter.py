"""The array operations of tests/interpreter.py have the results of the interpreter's loops."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

from tests.kernels.support import needs_interpreter


@needs_interpreter
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_an_exclusive_or(dtype: torch.dtype, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.jit
    def kernel(values, out, axis: tl.constexpr, keep_dims: tl.constexpr):
        at = tl.arange(0, 64).reshape(2, 8, 4)
        reduced = tl.xor_sum(tl.load(values + at), axis, keep_dims)
        flat = tl.reshape(reduced, (reduced.numel,))
        tl.store(out + tl.arange(0, reduced.numel), flat)

    values = torch.randint(-100, 100, (64,), dtype=dtype)
    results = []
    for _ in range(2):
        for keep_dims in (False, True):
            out = torch.zeros(32, dtype=dtype)
            kernel[(1,)](values, out, axis, keep_dims)
            assert out.any()
            results.append(out)
        monkeypatch.setattr(ReduceOps, "apply_impl", ReduceOps.generic_reduce)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@needs_interpreter
def test_a_dtype_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    named = vars(tl).values()
    dtypes = [dtype for dtype in named if isinstance(dtype, tl.dtype) and dtype != tl.void]
    every = [*dtypes, *(tl.block_type(d, [4]) for d in dtypes), *map(tl.pointer_type, dtypes)]
    every += [tl.block_type(tl.pointer_type(d), [4]) for d in dtypes]
    ours = [interpreter._get_np_dtype(dtype) for dtype in every]
    assert len(ours) > 40
    monkeypatch.undo()
    assert ours == [interpreter._get_np_dtype(dtype) for dtype in every]
