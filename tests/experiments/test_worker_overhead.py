"""`python -m experiments worker_overhead`: servers of another commit, and the ratios."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from experiments import worker_overhead
from experiments.measure import Run
from experiments.worker_overhead import Options, Pass, arms, compare, draft_side
from sglang_dflash.facts.errors import ConfigError


def is_a_checkout() -> bool:
    found = shutil.which("git") is not None
    words = ["git", "-C", str(worker_overhead.ROOT), "rev-parse", "HEAD"]
    return found and subprocess.run(words, capture_output=True).returncode == 0


needs_git = pytest.mark.skipif(not is_a_checkout(), reason="needs git and a checkout")


@needs_git
def test_a_server_of_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports our packages from a folder of its own, which is made once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    both = arms(Options(against="revision", revision="HEAD"))
    assert dict(both["ours"].flags) == dict(both["revision"].flags)
    tree, kernels = map(Path, both["revision"].env["PYTHONPATH"].split(":"))
    assert (tree / "sglang_dflash/__init__.py").exists()
    assert (kernels / "dflash_kernels/__init__.py").exists()
    assert [path.name for path in tmp_path.iterdir()] == [tree.name]
    (tree / "mark").touch()
    assert arms(Options(against="revision", revision="HEAD")) == both and (tree / "mark").exists()


@needs_git
@pytest.mark.parametrize(
    ("revision", "message"),
    [("", "--revision: ''; --against revision needs a commit"),
     ("no-such-commit", "--revision: git rev-parse: fatal: ")],
)  # fmt: skip
def test_no_such_commit(revision: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arms(Options(against="revision", revision=revision))


def passes(seconds: float, draft_ms: list[float | None]) -> list[Pass]:
    return [Pass(Run(100, seconds, 20, 1, [[1]]), ms) for ms in draft_ms]


def test_ratios_are_of_rounds() -> None:
    found = compare({"ours": passes(1.0, [2.0, 3.0, 4.0]), "other": passes(2.0, [4.0, 3.0, 5.0])})
    assert found["ours"]["draft_ms"] == 3.0 and found["step_time_ratio"] == 0.5
    times = [found[f"draft_time_ratio{of}"] for of in ("", "_min", "_max")]
    assert times == [0.8, 0.5, 1.0]


def test_the_built_in_worker_tells_no_draft_time() -> None:
    found = compare({"ours": passes(1.0, [2.0]), "builtin": passes(1.0, [None])})
    assert "draft_ms" not in found["builtin"] and "draft_time_ratio" not in found
    server: Any = type("Server", (), {"dflash": lambda _: {}})()
    assert draft_side(server) is None
    shown = {"decode_steps": 7, "host_seconds": {"propose": 1.0, "verify": 9.0, "commit": 0.5}}
    server = type("Server", (), {"dflash": lambda _: shown})()
    assert draft_side(server) == (7, 1.5)
