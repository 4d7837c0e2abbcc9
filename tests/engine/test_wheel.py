"""The wheel: what it contains, and that it works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(["uv", "build", "--wheel", "-q", "-o", str(out), str(ROOT)], check=True)
    (built,) = out.glob("*.whl")
    return built


def test_it_contains_the_package_the_kernels_and_one_pair(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(home).as_posix()
        for home in (ROOT, ROOT / "kernels")
        for path in home.glob("*dflash*/**/*.py")
    }
    assert len(modules) > 100 and modules <= names
    assert "sglang_dflash/py.typed" in names
    pairs = {name.split("/")[2] for name in names if name.startswith("sglang_dflash/demo_models/")}
    assert pairs == {"dense"}
    assert wheel.stat().st_size < 12_000_000


def test_it_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(home)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "sglang_dflash", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(home)},
            capture_output=True,
            text=True,
        )

    target, draft = run("demo-models", "dense").stdout.splitlines()
    assert Path(target).is_relative_to(home.resolve()) and Path(draft, "config.json").is_file()
    shown = run("inspect", target, draft)
    assert shown.returncode == 0 and shown.stdout.startswith("served by sglang-dflash")
    refused = run("demo-models", "hybrid")
    assert refused.returncode == 1
    assert "'hybrid' is not embedded here; there is dense (a checkout has all" in refused.stderr
