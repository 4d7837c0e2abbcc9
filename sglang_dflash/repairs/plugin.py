"""Entry point of `sglang.srt.plugins` for the repairs. It runs in every SGLang process."""

from __future__ import annotations

from sglang_dflash.repairs.seams import SEAMS
from sglang_dflash.seam.seam import install
from sglang_dflash.seam.version import supported


def register() -> None:
    """Repair SGLang, or log why not and leave it as it is.

    Raises:
        SeamError: a row of the table cannot be applied; ends the process.
    """
    if supported("SGLang runs without the repairs"):
        install(SEAMS)
