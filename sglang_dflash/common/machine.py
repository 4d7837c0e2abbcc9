"""The machine of a process. Loads without torch, `requests` and SGLang: experiments run on bare
machines too."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Date, processor, cores, memory, accelerator and versions; None for what is not there."""
    accelerator = None
    # `sglang-dflash env` works without torch.
    with suppress(ImportError):
        import torch

        accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": accelerator,
        "python": platform.python_version(),
        "sglang": version("sglang"),
        "torch": version("torch"),
        "triton": version("triton"),
    }


def available_bytes() -> int | None:
    """Memory that processes can have without swapping; None if the system does not tell."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kibibytes[0]) if kibibytes else None


def reach_this_machine() -> None:
    """Ask servers of this machine without the environment's proxy, here and in child processes."""
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, named.split(",")), "127.0.0.1", "localhost", "::1"])
    os.environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
