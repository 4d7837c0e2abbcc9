"""Shared by the kernel tests: outputs between canaries, a count of the interpreter's bytes, and
processes without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from dflash_kernels.traffic import Traffic
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tests import ROOT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What SGLang's request-to-token table may hold past a request's tokens.
GARBAGE = 2147480000
needs_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's bytes")


@dataclass
class Canaries:
    """Outputs with bytes of 0x5A before and after them."""

    margin: int = 256
    buffers: list[Tensor] = field(default_factory=list)

    def around(self, values: Tensor) -> Tensor:
        """A copy of `values` with canaries around it."""
        size = values.numel() * values.element_size()
        buffer = torch.full((size + 2 * self.margin,), 0x5A, dtype=torch.uint8, device=DEVICE)
        self.buffers.append(buffer)
        view = buffer[self.margin : self.margin + size].view(values.dtype).view(values.shape)
        view.copy_(values)
        return view

    def are_alive(self) -> bool:
        edges = [(b[: self.margin], b[-self.margin :]) for b in self.buffers]
        return all(bool((edge == 0x5A).all()) for pair in edges for edge in pair)


@dataclass
class Counted:
    """Bytes that the interpreter's loads and stores name, masked lanes left out."""

    read: int = 0
    written: int = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.read, self.written)

    def check(self, expected: Traffic) -> None:
        """Check the counted traffic; on a GPU nothing is counted."""
        assert DEVICE == "cuda" or self.traffic == expected


@contextmanager
def counted_bytes() -> Iterator[Counted]:
    """Count the bytes of all kernels that run inside."""
    count, load, store = (
        Counted(),
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def counting_load(self, ptrs, mask, other, *rest):
        value = load(self, ptrs, mask, other, *rest)
        count.read += int(mask.data.sum()) * value.data.itemsize
        return value

    def counting_store(self, ptrs, value, mask, *rest):
        count.written += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
        yield count


def run(*arguments: str, **environment: str) -> str:
    """Return the output of a Python process that has not loaded Triton's interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # SGLang itself may be found by PYTHONPATH.
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
