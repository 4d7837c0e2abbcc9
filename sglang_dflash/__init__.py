"""DFlash block-diffusion speculative decoding for SGLang."""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    """The version is read from the package's metadata when it is first asked for: reading it takes
    longer than the rest of a short command."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("sglang-dflash")
