"""Entry point of `sglang.srt.plugins` for the repairs. It runs in every SGLang process."""

from __future__ import annotations

from sglang_dflash.patches.patch import install
from sglang_dflash.patches.version import supported
from sglang_dflash.plugins.repairs.patches import PATCHES


def register() -> None:
    """Install the repairs. If this SGLang is not supported, log the reason and install nothing.

    Raises:
        PatchError: a patch cannot be applied. It ends the process.
    """
    if supported("SGLang runs without the repairs"):
        install(PATCHES)
