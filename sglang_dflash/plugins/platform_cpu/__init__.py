"""SGLang on a plain CPU, as an out-of-tree platform: a reference, exact first and fast second."""

from __future__ import annotations

import atexit
import os
import sys
import warnings

from sglang_dflash.patches.patch import LazyImport
from sglang_dflash.patches.version import supported, unsupported
from sglang_dflash.serving.start.launch import asks_for_help_of_serve

# Warnings that SGLang repeats in each process without an accelerator; we silence them.
_BESIDE_THE_POINT = (
    r"Only CUDA, .*support (AWQ|GGUF)",
    "Triton is not supported on current platform",
)
PLATFORM = "sglang_dflash.plugins.platform_cpu.platform.PlainCpuPlatform"
ATTENTION_BACKEND = "torch_native"
# "1" keeps SGLang's overlap scheduler, so that it can be tested.
OVERLAP = "SGLANG_DFLASH_CPU_OVERLAP"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: our platform's path, or None.

    None if there is an accelerator, if SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine
    (AMX kernels), or if this is not the SGLang that we were written for.
    """
    import torch

    if asks_for_help_of_serve(sys.argv) and unsupported() is None:
        # Before it prints this help, SGLang loads platforms, but never the plugin with our flags.
        atexit.register(LazyImport("sglang_dflash.serving.start.flags:print_help"))
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    if not supported("the plain-CPU platform is disabled"):
        return None
    # SGLang compiles functions of its sampler at the first request that needs them. On a CPU this
    # blocks the server for half a minute and needs a C++ compiler; without one the server ends.
    # torch reads the variable when a function is decorated, and child processes inherit it.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for message in _BESIDE_THE_POINT:
        warnings.filterwarnings("ignore", message, UserWarning)
    return PLATFORM


def is_active(platform: object) -> bool:
    """Return whether SGLang runs on our platform in this process."""
    return f"{type(platform).__module__}.{type(platform).__qualname__}" == PLATFORM
