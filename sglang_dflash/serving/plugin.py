"""Entry point of `sglang.srt.plugins`. It runs in every SGLang process, so it imports little."""

from __future__ import annotations

import sys

from sglang_dflash.patches.patch import install
from sglang_dflash.patches.version import supported
from sglang_dflash.serving.patches import PATCHES
from sglang_dflash.serving.start.launch import refuse_early


def register() -> None:
    """Put our flags and our worker into SGLang, or log why not and leave it as it is.

    Raises:
        SystemExit: the server could not start with its command line.
        PatchError: a row of the table cannot be applied; ends the process.
    """
    if supported("SGLang's built-in DFLASH worker runs instead"):
        # The rows import most of SGLang.
        refuse_early(sys.argv)
        install(PATCHES)
