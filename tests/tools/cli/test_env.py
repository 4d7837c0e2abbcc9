"""`sglang-dflash env` without SGLang and with another one; of this one, see engine/test_env.py."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from sglang.srt.platforms.interface import SRTPlatform

from sglang_dflash.plugins.platform_cpu.platform import PlainCpuPlatform
from sglang_dflash.serving.metrics.server_info import OURS
from sglang_dflash.tools import cli
from sglang_dflash.tools.cli import env
from tests.patches.test_tables import TABLES

WITHOUT_SGLANG = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name == "sglang":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
# torch takes seconds to import.
sys.modules["sglang"] = sys.modules["torch"] = None
from sglang_dflash.tools.cli import main
assert main(["env"]) == 0
assert main(["env", "--json"]) == 0
"""


def test_without_sglang_it_tells_so() -> None:
    *text, line = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_SGLANG],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert text[0] == "worker: none" and text[1].startswith("why: sglang is not installed")
    report = json.loads(line)
    assert report["worker"] == "none"
    assert report["versions"]["sglang"] is None and report["versions"]["python"]
    assert report["machine"]["cores"] and report["machine"]["accelerator"] is None


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins are not loaded in this process: other tests need SGLang as it is."""
    monkeypatch.setattr(env, "load_plugins", lambda: (None, None))
    monkeypatch.setattr(env, "any_in_place", lambda _: True)


def reported(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The worker, and why."""
    assert cli.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report["worker"], report["reason"]


def test_another_sglang_serves_with_its_own_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.6.0" if name == "sglang" else real(name)
    )
    needed = "sglang-dflash needs sglang==0.5.23, this is sglang==0.6.0"
    assert reported(capsys) == (env.SGLANG_WORKER, needed)


def test_a_plugin_that_is_left_out_and_a_server_that_would_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "any_in_place", lambda _: False)
    worker, reason = reported(capsys)
    assert worker == env.SGLANG_WORKER and reason.startswith("our plugin dflash is not loaded")
    monkeypatch.setattr(env, "load_plugins", lambda: (None, "cannot apply the patch x"))
    assert reported(capsys) == ("none", "a server ends at start: cannot apply the patch x")


@pytest.mark.parametrize(
    ("accelerator", "ours", "worker"),
    [(False, False, "none"), (False, True, OURS), (True, False, OURS)],
)
def test_without_a_gpu_the_cpu_plugin_is_needed(
    accelerator: bool,
    ours: bool,
    worker: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own platform refuses a draft on a CPU."""
    platform = PlainCpuPlatform() if ours else SRTPlatform()
    monkeypatch.setattr(env, "load_plugins", lambda: (platform, None))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    found, reason = reported(capsys)
    assert found == worker and ("dflash_cpu is not loaded" in reason) == (worker == "none")


def test_every_change_is_listed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang is not loaded for it."""
    assert cli.main(["env", "--changes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["changes"]
    tables = {row for table in TABLES.values() for row in table}
    assert {(one["target"], one["kind"]) for one in listed} == {
        (row.target, row.kind.value) for row in tables
    }
    assert {one["plugin"] for one in listed} == {"dflash", "dflash_repairs", "dflash_cpu"}
    # None twice: under one plugin, and in one kind of process.
    assert len(listed) == len(tables)
    assert cli.main(["env", "--changes"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    for row in tables:
        assert row.target in words.replace(" .", ".") and row.reason in words
