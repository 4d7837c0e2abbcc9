"""Loads our CPU plugin as SGLang does, in a process of its own: hooks stay for its life.

Run by tests/engine/test_cpu_plugin.py; prints one JSON object. Every case but the last is a fork.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_dflash.patches.patch import Kind, Patch, install, verify
from sglang_dflash.plugins.platform_cpu import ATTENTION_BACKEND, is_active, plugin
from sglang_dflash.plugins.platform_cpu import patches as patches

TARGET = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def forked(prepare: Callable[[], None]) -> dict[str, Any]:
    """Exit status and stderr of a process that loads the plugins after `prepare`."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            prepare()
            try:
                load_plugins()
                print(json.dumps(sorted(HookRegistry._hooks)), file=sys.stderr, flush=True)
                os._exit(0)
            except SystemExit as end:
                print(end.code, file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return {"status": os.waitstatus_to_exitcode(status), "stderr": errors.read().decode()}


def add_row(target: str) -> None:
    row = Patch(target, Kind.REPLACE, print, "it would do something else.", "tests/x.py::y")
    patches.PATCHES = (*patches.PATCHES, row)


def hook_of_another_plugin() -> None:
    source = HookSource("rival", "rival-dist")
    HookRegistry.register(TARGET, print, HookType.REPLACE, source=source)


def loaded() -> dict[str, Any]:
    """State of this process after the plugins are loaded, and after a second `register`."""
    os.environ.pop("OMP_NUM_THREADS", None)
    load_plugins()
    verify(patches.PATCHES)
    install(patches.PATCHES)
    plugin.register()
    return {
        "active": is_active(current_platform),
        "hooks": {target: len(hooks) for target, hooks in HookRegistry._hooks.items()},
        "patched": sorted(HookRegistry._patched),
        "draft_backends": choices.DRAFT_ATTENTION_BACKEND_CHOICES.count(ATTENTION_BACKEND),
        "deterministic": choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(ATTENTION_BACKEND),
        "threads": os.environ["OMP_NUM_THREADS"],
    }


if __name__ == "__main__":
    for row in patches.PATCHES:
        pkgutil.resolve_name(row.parent)
    results = {
        "missing name": forked(lambda: add_row("sglang.srt.environ.no_such_name")),
        "hook": forked(hook_of_another_plugin),
    }
    print(json.dumps({**results, "loaded": loaded()}))
