"""SGLang on a plain CPU, as an out-of-tree platform: a reference platform, right first and reasonable second."""

from __future__ import annotations

import os

PLATFORM = "sglang_dflash.platform_cpu.platform.PlainCpuPlatform"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: our platform where there is no accelerator, else None.

    SGLang's own CPU engine (AMX kernels, asked for by SGLANG_USE_CPU_ENGINE=1) keeps precedence.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    return PLATFORM


def is_active(platform: object) -> bool:
    """Whether SGLang runs on our platform in this process."""
    return f"{type(platform).__module__}.{type(platform).__qualname__}" == PLATFORM
