"""`python -m experiments worker_overhead`: the packages of another commit, and the ratios."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.worker_overhead import (
    ROOT,
    OverheadPass,
    compare,
    draft_side,
    environment_of,
    spread,
    unpack,
)
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench.load import Answer
from tests.errors import refused


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_the_packages_of_another_commit(tmp_path: Path) -> None:
    unpack("HEAD", tmp_path)
    assert (tmp_path / "sglang_dflash/__init__.py").exists()
    assert (tmp_path / "kernels/dflash_kernels/__init__.py").exists()
    for revision in ("", "no-such-commit"):
        with refused("revision", revision):
            unpack(revision, tmp_path)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_a_server_loads_that_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does even if it is started in the checkout, and finds what PYTHONPATH has."""
    unpack("HEAD", tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/of_pythonpath.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path / 'other'}")
    module = tmp_path / "sglang_dflash/where.py"
    module.write_text("import sglang_dflash, dflash_kernels, of_pythonpath\n"
                      "print(sglang_dflash.__file__, dflash_kernels.__file__)\n")  # fmt: skip
    command = [sys.executable, "-m", "sglang_dflash.where"]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment_of(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert [Path(one).is_relative_to(tmp_path) for one in ran.stdout.split()] == [True, True], ran


def turns(seconds: float, draft_ms: list[float | None]) -> list[OverheadPass]:
    answers = [[Answer("", (1,), 1, 0.1, seconds)]]
    return [OverheadPass(seconds, answers, VerifySteps(20, 20), 1, ms) for ms in draft_ms]


def test_ratios_are_of_rounds() -> None:
    found = compare({"ours": turns(1.0, [2.0, 3.0, 4.0]), "other": turns(2.0, [4.0, 3.0, 5.0])})
    assert found["ours"]["draft_ms"] == 3.0 and found["step_time_ratio"] == 0.5
    times = [found[f"draft_time_ratio{of}"] for of in ("", "_min", "_max")]
    assert times == [0.8, 0.5, 1.0]


@pytest.mark.parametrize(
    ("count", "low", "high"), [(5, 1, 5), (6, 1, 6), (9, 2, 8), (30, 10, 21), (100, 40, 61)]
)
def test_the_interval_of_a_median(count: int, low: int, high: int) -> None:
    """The interval is that of tables of the sign test; for few values it is all of them."""
    found = spread("x", [float(value) for value in range(count, 0, -1)])
    assert (found["x_low"], found["x_high"]) == (low, high)
    assert (found["x_min"], found["x_max"]) == (1, count)


def test_the_built_in_worker_tells_no_draft_time() -> None:
    found = compare({"ours": turns(1.0, [2.0]), "builtin": turns(1.0, [None])})
    assert "draft_ms" not in found["builtin"] and "draft_time_ratio" not in found
    shown: dict[str, Any] = {}
    server: Any = type("Server", (), {"dflash": lambda _: shown})()
    assert draft_side(server) is None
    seconds = {"propose": 1.0, "verify": 9.0, "commit": 0.5}
    shown.update(decode_steps=7, host_seconds=seconds)
    assert draft_side(server) == (7, 1.5)
