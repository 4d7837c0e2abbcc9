"""DFlash over a Hugging Face Transformers target, without a server.

The names of `__all__` are loaded on first use: `hf.arguments` has to load without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.transformers_loop.draft_model import DFlashDraftModel
    from sglang_dflash.transformers_loop.generation import (
        Generation,
        Prefill,
        chat_tokens,
        prefill,
        sampler,
        spec_generate,
    )

__all__ = [
    "DFlashDraftModel",
    "Generation",
    "Prefill",
    "chat_tokens",
    "prefill",
    "sampler",
    "spec_generate",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "draft_model" if name == "DFlashDraftModel" else "generation"
    return getattr(import_module(f"sglang_dflash.transformers_loop.{module}"), name)
