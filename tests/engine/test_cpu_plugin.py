"""The plugin entry of the CPU platform: what it changes, and what ends the process."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from sglang_dflash.plugins.platform_cpu.patches import PATCHES
from tests.engine.session import ServerSession
from tests.plugins.platform_cpu.loading import TARGET

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the platform is not active with an accelerator"
)


@pytest.fixture(scope="module")
def loading(servers: ServerSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of loading.py, which loads our CPU plugin only."""
    log = tmp_path_factory.mktemp("loading") / "log"
    command = "tests.plugins.platform_cpu.loading"
    status, lines = servers.nursery.run(command, log=log, SGLANG_PLUGINS="dflash_cpu")
    assert status == 0, lines[-20:]
    return json.loads(lines[-1])


@pytest.mark.parametrize(("case", "named"), [
    ("missing name", ["sglang.srt.environ.no_such_name", "cannot resolve it", "something else."]),
    ("hook", [TARGET, "builtins:print", "plugin=rival, dist=rival-dist"]),
])  # fmt: skip
def test_a_patch_that_cannot_be_applied_ends_the_process(
    case: str, named: list[str], loading: dict[str, Any]
) -> None:
    result = loading[case]
    assert result["status"] == 1
    message = result["stderr"].splitlines()[-1]
    assert message.startswith("sglang-dflash: cannot apply the patch")
    assert "docs/upgrading-sglang.md" in message
    assert all(text in message for text in named), message


def test_every_row_is_applied_once(loading: dict[str, Any]) -> None:
    state = loading["loaded"]
    hooks = {row.target for row in PATCHES if row.kind.is_hook}
    assert state["active"] and state["patched"] == sorted(hooks)
    assert state["hooks"] == dict.fromkeys(hooks, 1)
    assert state["draft_backends"] == state["deterministic"] == 1
    assert int(state["threads"]) == max(1, (os.cpu_count() or 1) - 1)
