"""DFlash block-diffusion speculative decoding for SGLang."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.hf.draft_model import DFlashDraftModel

__all__ = ["DFlashDraftModel", "__version__"]
__version__ = _version("sglang-dflash")


def __getattr__(name: str) -> Any:
    """`DFlashDraftModel` on first use: it needs torch, and SGLang imports this package early."""
    if name != "DFlashDraftModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("sglang_dflash.hf.draft_model").DFlashDraftModel
