"""Array operations in place of loops of Triton's interpreter that took most of its time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps


def replacements() -> tuple[tuple[Any, str, Any], ...]:
    """Owner, name and function: with the results of those that the interpreter has there."""
    looked_up, reduce = functools.cache(interpreter._get_np_dtype), ReduceOps.apply_impl

    def numpy_dtype(dtype: Any) -> np.dtype[Any]:
        # It looks through all dtypes of Triton.
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        is_pointer = isinstance(element, tl.pointer_type)
        return np.dtype(np.uint64) if is_pointer else looked_up(element)

    def apply_impl(self: Any, input: tuple[Any, ...]) -> Any:
        # A sort exchanges elements so. The interpreter knows NumPy's sum, but no other reduction.
        if self.combine_fn is not tl.standard._xor_combine:
            return reduce(self, input)
        (values,) = input
        reduced = np.bitwise_xor.reduce(values.handle.data, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(reduced, values.dtype)

    return (
        (interpreter, "_get_np_dtype", numpy_dtype),
        (ReduceOps, "apply_impl", apply_impl),
    )
