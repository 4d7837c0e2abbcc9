"""DFlash over a Hugging Face Transformers target, without a server."""

from sglang_dflash.tools.transformers_loop.draft_model import DFlashDraftModel
from sglang_dflash.tools.transformers_loop.generation import (
    Generation,
    Prefill,
    Sampler,
    prefill,
    spec_generate,
)
from sglang_dflash.tools.transformers_loop.pair import LoadedPair, chat_tokens, load

__all__ = [
    "DFlashDraftModel",
    "Generation",
    "LoadedPair",
    "Prefill",
    "Sampler",
    "chat_tokens",
    "load",
    "prefill",
    "spec_generate",
]
