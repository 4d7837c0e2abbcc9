"""Entry point of `sglang.srt.plugins`. It runs in every SGLang process, so it imports little."""

from __future__ import annotations

import sys

from sglang_dflash.facts.launch import refuse_early
from sglang_dflash.seam.seam import install
from sglang_dflash.seam.version import supported
from sglang_dflash.serving.seams import SEAMS


def register() -> None:
    """Put our flags and our worker into SGLang, or log why not and leave it as it is.

    Raises:
        SystemExit: the server could not start with its command line.
        SeamError: a row of the table cannot be applied; ends the process.
    """
    if supported("SGLang's built-in DFLASH worker runs instead"):
        # The rows import most of SGLang.
        refuse_early(sys.argv)
        install(SEAMS)
