"""Kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRET = not torch.cuda.is_available()
if INTERPRET:
    # Read when a kernel is defined and when it runs; in between it is taken back, so that no server of another test inherits it.
    os.environ["TRITON_INTERPRET"] = "1"
    import dflash_kernels.gated_delta_fold  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
