"""Patches of SGLang that each documented value of SGLANG_PLUGINS installs: in every process, and in
a scheduler process that our worker serves; and that servers of the tests have them wherever SGLang
would put them (bindings.py). (Requests without the repairs: test_exactness.py, `worker-only`.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.session import ServerSession

LOADED = """
import json
import pkgutil
import sys
from sglang.srt.plugins import hook_registry
# A copy in a module that the nursery does not know.
from sglang.srt.utils import kill_itself_when_parent_died
from sglang_dflash.plugins.platform_cpu import patches as platform_cpu
from sglang_dflash.plugins.repairs import patches as repairs
from sglang_dflash.patches.patch import _in_place, install_late, load_plugins
from sglang_dflash.serving import patches as serving

sampling, worker = serving.SAMPLING_PATCHES, serving.WORKER_PATCHES
tables = {
    "sampling": sampling,
    "worker": [row for row in worker if row not in sampling],
    "serving": serving.PATCHES,
    "repairs": [row for row in repairs.PATCHES if row not in sampling],
    "platform_cpu": platform_cpu.PATCHES,
}

def in_place():
    return {
        name: "all" if all(map(_in_place, table)) else "some" if any(map(_in_place, table)) else ""
        for name, table in tables.items()
    }

def unpatched():
    originals = {}
    for target in hook_registry.HookRegistry._patched:
        function = pkgutil.resolve_name(target)
        for _ in hook_registry.HookRegistry._hooks[target]:
            function = function.__wrapped__
        originals[id(function)] = function
    modules = [module for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    return [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in list(vars(module).items())
        if id(value) in originals
    ]

_, problem = load_plugins()
loaded = in_place()
if loaded["serving"]:
    # As our worker does.
    install_late(worker, "a test")
found = {"problem": problem, "loaded": loaded, "served": in_place(), "unpatched": unpatched()}
print(json.dumps(found))
"""
NOTHING = dict.fromkeys(("sampling", "worker", "serving", "repairs", "platform_cpu"), "")
WORKER_ONLY = {**NOTHING, "serving": "all", "platform_cpu": "all"}
EVERYTHING = {**WORKER_ONLY, "sampling": "all", "repairs": "all"}
SERVED = {"sampling": "all", "worker": "all"}


@pytest.mark.parametrize(("value", "loaded", "served"), [
    ("", EVERYTHING, {**EVERYTHING, **SERVED}),
    # A plain server samples as SGLang does.
    ("dflash,dflash_cpu", WORKER_ONLY, {**WORKER_ONLY, **SERVED}),
    ("none", NOTHING, NOTHING),
], ids=["all", "worker only", "none"])  # fmt: skip
def test_a_value_installs_whole_tables(
    value: str,
    loaded: dict[str, str],
    served: dict[str, str],
    servers: ServerSession,
    tmp_path: Path,
) -> None:
    script = tmp_path / "loaded.py"
    script.write_text(LOADED)
    status, lines = servers.nursery.run(str(script), log=tmp_path / "log", SGLANG_PLUGINS=value)
    assert status == 0, lines[-20:]
    found = json.loads(lines[-1])
    assert found == {"problem": None, "loaded": loaded, "served": served, "unpatched": []}
