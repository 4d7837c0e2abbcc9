"""Entry point of `sglang.srt.plugins`: runs in every SGLang process, so it checks, registers and imports nothing heavy."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.23"


def register() -> None:
    """Hook our flags and our worker into SGLang, or say why not and leave it as it is."""
    from sglang.version import __version__

    if __version__ != SGLANG_VERSION:
        logger.error(
            "sglang-dflash serves SGLang %s, this is %s: the built-in DFLASH worker runs instead. Install sglang==%s.",
            SGLANG_VERSION, __version__, SGLANG_VERSION,
        )  # fmt: skip
        return

    from sglang.srt.platforms import current_platform

    from sglang_dflash.platform_cpu import PLATFORM

    if f"{type(current_platform).__module__}.{type(current_platform).__qualname__}" == PLATFORM:
        from sglang_dflash.platform_cpu.hooks import register_hooks

        register_hooks()
