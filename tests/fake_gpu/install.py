"""Turns this process into one with a faked GPU."""

from __future__ import annotations

import importlib
import os
import sys

# What SGLang and Triton read; a server needs them in its environment, too.
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}


def install(without: tuple[str, ...] = ()) -> None:
    """Install the fake GPU, before anything of SGLang or Triton is imported.

    Args:
        without: packages that are as if they were not installed.
    """
    os.environ.update(ENVIRONMENT)
    for name in without:
        sys.modules[name] = None  # type: ignore[assignment]
    from tests.fake_gpu import driver

    driver.load_stub()
    # They look at torch.cuda when they are imported.
    for name in ("torch._dynamo", "torch._inductor"):
        importlib.import_module(name)
    from tests.fake_gpu import cuda, hooks, interpreter

    cuda.replace_torch_cuda()
    cuda.remember_registered_operators()
    cuda.replace_nccl()
    cuda.enter_every_thread()
    interpreter.install()
    hooks.install()
