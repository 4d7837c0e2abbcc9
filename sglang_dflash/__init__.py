"""DFlash block-diffusion speculative decoding for SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.tools.transformers_loop.draft_model import DFlashDraftModel

__all__ = ["DFlashDraftModel", "__version__"]
__version__: str


def __getattr__(name: str) -> Any:
    """Names on first use: the model needs torch, and reading the version from the package's
    metadata takes longer than the rest of a short command."""
    if name == "DFlashDraftModel":
        from sglang_dflash.tools.transformers_loop.draft_model import DFlashDraftModel

        return DFlashDraftModel
    if name == "__version__":
        from importlib.metadata import version

        return version("sglang-dflash")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
