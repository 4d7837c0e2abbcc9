"""`sglang-dflash env` without SGLang and with another one; of this one, see engine/test_env.py."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

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
# torch takes seconds to import.
sys.modules["sglang"] = sys.modules["torch"] = None
from sglang_dflash.cli import main
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


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """The worker, and why."""
    assert cli.main(["env", "--json", *arguments]) == 0
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
    pair = ["--target", str(PAIR.target), "--draft", str(PAIR.draft)]
    assert reported(capsys, *pair) == (env.BUILTIN, needed)


def test_a_plugin_that_is_left_out_and_a_server_that_would_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "any_in_place", lambda _: False)
    worker, reason = reported(capsys)
    assert worker == env.BUILTIN and reason.startswith("our plugin dflash is not loaded")
    monkeypatch.setattr(env, "load_plugins", lambda: (None, "cannot apply the seam x"))
    assert reported(capsys) == ("none", "a server ends at start: cannot apply the seam x")


def test_the_worker_of_a_pair_is_that_of_inspect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    raw = json.loads((PAIR.draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "projector_type": "domino"}))
    target, draft = str(PAIR.target), str(PAIR.draft)
    worker, reason = reported(capsys, "--target", target, "--draft", str(tmp_path))
    assert worker == env.BUILTIN and reason.startswith("projector_type in the draft")
    assert reported(capsys, "--target", target, "--draft", draft)[0] == env.OURS
    for half_or_swapped in (["--target", target], ["--target", draft, "--draft", target]):
        assert cli.main(["env", *half_or_swapped]) == 1
    shown = capsys.readouterr().err
    assert "--target and --draft: give both" in shown and "the target comes first" in shown
