"""SGLang on a plain CPU, as an out-of-tree platform: a reference, right first, fast second."""

from __future__ import annotations

import atexit
import os
import sys
import warnings

from sglang_dflash.patches.patch import LazyImport
from sglang_dflash.patches.version import supported, unsupported
from sglang_dflash.serving.start.launch import asks_for_help_of_serve

# What SGLang warns of in each of its processes where there is no accelerator, as that is known.
_BESIDE_THE_POINT = (
    r"Only CUDA, .*support (AWQ|GGUF)",
    "Triton is not supported on current platform",
)
PLATFORM = "sglang_dflash.plugins.platform_cpu.platform.PlainCpuPlatform"
ATTENTION_BACKEND = "torch_native"
# With "1" SGLang's overlap scheduler stays: for tests of it.
OVERLAP = "SGLANG_DFLASH_CPU_OVERLAP"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: our platform's path, or None.

    None if there is an accelerator, if SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine
    (AMX kernels), or if this is not the SGLang that we were written for.
    """
    import torch

    if asks_for_help_of_serve(sys.argv) and unsupported() is None:
        # SGLang asks for platforms alone before it prints that help; it loads the plugin with our
        # flags after it, on no machine.
        atexit.register(LazyImport("sglang_dflash.serving.start.flags:print_help"))
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    if not supported("the plain-CPU platform is disabled"):
        return None
    # SGLang compiles functions of its sampler at the first request that needs them. On a CPU that
    # takes half a minute, in which the server answers nothing, and a C++ compiler; without one the
    # server ends. torch reads the variable where a function is decorated, and children inherit it.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for message in _BESIDE_THE_POINT:
        warnings.filterwarnings("ignore", message, UserWarning)
    return PLATFORM


def is_active(platform: object) -> bool:
    """Return whether SGLang runs on our platform in this process."""
    return f"{type(platform).__module__}.{type(platform).__qualname__}" == PLATFORM
