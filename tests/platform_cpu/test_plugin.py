"""The platform and its plugin entry: when they are active, and what ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from sglang_dflash.platform_cpu import PLATFORM, activate
from sglang_dflash.platform_cpu.seams import SEAMS
from tests.platform_cpu.loading import TARGET


def starts_sglang(test: Any) -> Any:
    """Not of the fast tier: real SGLang processes, started once for all of these tests."""
    return pytest.mark.engine(pytest.mark.xdist_group("cpu plugin")(test))


@pytest.fixture(scope="module")
def loading() -> dict[str, Any]:
    """What loading.py prints; only our CPU plugin is loaded there."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.platform_cpu.loading"],
        env={**os.environ, "SGLANG_PLUGINS": "dflash_cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_it_activates_only_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert activate() == PLATFORM
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_it_does_not_activate_for_another_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0.1")
    assert activate() is None
    assert "sglang==0.0.1" in caplog.text and "plain-CPU platform is disabled" in caplog.text


no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the platform is not active with an accelerator"
)


@no_accelerator
@pytest.mark.parametrize(("case", "named"), [
    ("missing name", ["sglang.srt.environ.no_such_name", "cannot resolve it", "something else."]),
    ("hook", [TARGET, "builtins:print", "plugin=rival, dist=rival-dist"]),
])  # fmt: skip
@starts_sglang
def test_a_seam_that_cannot_be_applied_ends_the_process(
    case: str, named: list[str], loading: dict[str, Any]
) -> None:
    result = loading[case]
    assert result["status"] == 1
    message = result["stderr"].splitlines()[-1]
    assert message.startswith("sglang-dflash: cannot apply the seam")
    assert "docs/upgrading-sglang.md" in message
    assert all(text in message for text in named), message


@no_accelerator
@starts_sglang
def test_another_sglang_is_left_as_it_is(loading: dict[str, Any]) -> None:
    result = loading["version"]
    assert result["status"] == 0 and "sglang==0.0.1" in result["stderr"]
    assert json.loads(result["stderr"].splitlines()[-1]) == []


@no_accelerator
@starts_sglang
def test_every_row_is_applied_once(loading: dict[str, Any]) -> None:
    state = loading["loaded"]
    hooks = {row.target for row in SEAMS if row.kind.is_hook}
    assert state["active"] and state["patched"] == sorted(hooks)
    assert state["hooks"] == dict.fromkeys(hooks, 1)
    assert state["draft_backends"] == state["deterministic"] == 1
    assert int(state["threads"]) == max(1, (os.cpu_count() or 1) - 1)
