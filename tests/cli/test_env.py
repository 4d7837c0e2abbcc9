"""`sglang-dflash env` without SGLang and with another one; of this one, see engine/test_env.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.cli import env
from sglang_dflash.facts.embedded import demo_pair

PAIR = demo_pair("dense")
WITHOUT_SGLANG = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name == "sglang":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
sys.modules["sglang"] = None
from sglang_dflash.cli import main
assert main(["env"]) == 0
assert main(["env", "--json"]) == 0
"""


def run(*command: str, **variables: str) -> list[str]:
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, **variables},
    )
    return shown.stdout.splitlines()


def test_without_sglang_it_tells_so() -> None:
    *text, line = run("-c", WITHOUT_SGLANG)
    assert text[0] == "worker: none" and text[1].startswith("why: sglang is not installed")
    assert "  not checked without SGLang" in text
    report = json.loads(line)
    assert report["worker"] == "none" and report["seams"] == []
    assert report["versions"]["sglang"] is None and report["versions"]["python"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins are not loaded in this process: other tests need SGLang as it is."""
    monkeypatch.setattr(env, "load_plugins", lambda: (None, None))
    monkeypatch.setattr(env, "_seams", lambda platform: [])
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["env", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("loaded")
def test_another_sglang_serves_with_its_own_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.6.0" if name == "sglang" else real(name)
    )
    pair = ["--target", str(PAIR.target), "--draft", str(PAIR.draft)]
    report = reported(capsys, *pair)
    assert report["worker"] == "SGLang's built-in worker"
    assert report["reason"] == "sglang-dflash needs sglang==0.5.23, this is sglang==0.6.0"


@pytest.mark.usefixtures("loaded")
def test_a_plugin_that_is_left_out_is_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "dflash_cpu")
    report = reported(capsys)
    assert report["worker"] == "SGLang's built-in worker"
    assert report["reason"] == "our plugin 'dflash' is not loaded: SGLANG_PLUGINS=dflash_cpu"
    assert report["variables"]["SGLANG_PLUGINS"] == "dflash_cpu"


@pytest.mark.usefixtures("loaded")
def test_a_server_that_would_end_at_start_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "load_plugins", lambda: (None, "cannot apply the seam x"))
    report = reported(capsys)
    told = "a server ends at start: cannot apply the seam x"
    assert (report["worker"], report["reason"]) == ("none", told)


@pytest.mark.usefixtures("loaded")
def test_the_worker_of_a_pair_is_that_of_inspect(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    raw = json.loads((PAIR.draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "selector_rank": 8}))
    report = reported(capsys, "--target", str(PAIR.target), "--draft", str(tmp_path))
    assert report["worker"] == "SGLang's built-in worker"
    assert report["reason"].startswith("selector_rank: 8")
    assert cli.main(["env", "--target", str(PAIR.target)]) == 1
    assert "--target and --draft: give both" in capsys.readouterr().err
    swapped = ["--target", str(PAIR.draft), "--draft", str(PAIR.target)]
    assert cli.main(["env", *swapped]) == 1
    assert "is a draft; the target comes first" in capsys.readouterr().err
