"""Entry point of `sglang.srt.plugins` for the repairs. It runs in every SGLang process."""

from __future__ import annotations

from sglang_dflash.patches.patch import install
from sglang_dflash.patches.version import supported
from sglang_dflash.plugins.repairs.patches import PATCHES


def register() -> None:
    """Repair SGLang, or log why not and leave it as it is.

    Raises:
        PatchError: a row of the table cannot be applied; ends the process.
    """
    if supported("SGLang runs without the repairs"):
        install(PATCHES)
