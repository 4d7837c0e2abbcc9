"""Entry point of `sglang.srt.plugins` for the plain-CPU platform. Runs in every SGLang process."""

from __future__ import annotations

import os


def register() -> None:
    """Install the platform's patches if SGLang runs on it in this process.

    Raises:
        PatchError: a patch cannot be applied. It ends the process.
    """
    from sglang.srt.platforms import current_platform

    from sglang_dflash.plugins.platform_cpu import ATTENTION_BACKEND, is_active

    if not is_active(current_platform):
        return

    from sglang.srt.arg_groups import choices

    from sglang_dflash.patches.patch import install
    from sglang_dflash.plugins.platform_cpu.patches import PATCHES

    # The scheduler process inherits this. HTTP server, tokenizer and detokenizer are other
    # processes, and need a core on which no OpenMP thread of the scheduler spins.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    install(PATCHES)
    if ATTENTION_BACKEND not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])
        choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
