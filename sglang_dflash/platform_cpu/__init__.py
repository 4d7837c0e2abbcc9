"""SGLang on a plain CPU, as an out-of-tree platform: a reference, right first, fast second."""

from __future__ import annotations

import os

PLATFORM = "sglang_dflash.platform_cpu.platform.PlainCpuPlatform"
ATTENTION_BACKEND = "torch_native"
# Completes the message of a failed version check.
WITHOUT_US = "the plain-CPU platform is disabled"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: our platform's path, or None.

    None if there is an accelerator, if SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine
    (AMX kernels), or if this is not the SGLang that we were written for.
    """
    import torch

    from sglang_dflash.seam.version import supported

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    return PLATFORM if supported(WITHOUT_US) else None


def is_active(platform: object) -> bool:
    """Whether SGLang runs on our platform in this process."""
    return f"{type(platform).__module__}.{type(platform).__qualname__}" == PLATFORM
