"""What this machine and this installation give SGLang: versions, devices, variables and plugins.

Works without SGLang, and with a release that we were not written for.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PLUGINS, PLATFORMS = "sglang.srt.plugins", "sglang.srt.platforms"
_PACKAGES = ("sglang-dflash", "sglang", "torch", "triton", "transformers", "huggingface_hub")
_KERNELS = (
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flash-attn-4",
    "flash-attn",
    "flash-linear-attention",
    "tilelang",
)
_VARIABLES = ("SGLANG_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_ENDPOINT")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed. Optional kernels only if they are."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= {name: version_of(name) for name in _PACKAGES}
    kernels = {name: version_of(name) for name in _KERNELS}
    found |= {name: version for name, version in kernels.items() if version is not None}
    return {**found, "system": platform.platform()}


def devices() -> list[str]:
    """The processor, then the accelerators that torch finds, in words."""
    found = [f"{_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB of memory"]
    try:
        import torch
    except ImportError as error:
        return [*found, f"torch cannot be imported ({error})"]
    if torch.cuda.is_available():
        driver = _driver()
        for i in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(i)
            found.append(
                f"{of.name}, {of.total_memory / 2**30:.0f} GiB, compute capability "
                f"{of.major}.{of.minor}, CUDA {torch.version.cuda}{driver}"
            )
    elif torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found.append(f"{torch.accelerator.device_count()} of type {kind}")
    else:
        found.append("no accelerator")
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
    return f", driver {lines[0]}" if lines else ""


def variables() -> dict[str, str]:
    """Environment variables that are set and change what a server does, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
    }


def plugins() -> list[dict[str, Any]]:
    """The installed plugins of SGLang's two groups: their distribution, and why one is left out."""
    return [
        {
            "group": group,
            "name": entry.name,
            "value": entry.value,
            "distribution": entry.dist.name if entry.dist else None,
            "version": entry.dist.version if entry.dist else None,
            "left_out": _left_out(entry),
        }
        for group in (PLUGINS, PLATFORMS)
        for entry in importlib.metadata.entry_points(group=group)
    ]


def _left_out(entry: importlib.metadata.EntryPoint) -> str | None:
    """Why SGLang does not load this plugin, by the rules of `sglang.srt.plugins`; None if it does.

    SGLANG_PLUGINS lists the plugins that are loaded. SGLANG_PLATFORM selects a platform: those of
    other names are not loaded, nor are plugins of the distributions that provide only them.
    """
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected and entry.group == PLATFORMS:
        return None if entry.name == selected else f"SGLANG_PLATFORM={selected}"
    if selected and entry.dist:
        others = importlib.metadata.entry_points(group=PLATFORMS)
        if any(o.dist and o.dist.name == entry.dist.name and o.name != selected for o in others):
            return f"SGLANG_PLATFORM={selected}"
    allowed = os.environ.get("SGLANG_PLUGINS")
    names = {name.strip() for name in (allowed or "").split(",") if name.strip()}
    return f"SGLANG_PLUGINS={allowed}" if allowed and entry.name not in names else None
