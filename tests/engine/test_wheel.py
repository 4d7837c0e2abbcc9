"""The wheel: what it contains, and that it works away from the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dflash.tools.bench.server import Server, ServerConfig
from tests import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]


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
    assert len(modules) > 80 and modules <= names
    assert "sglang_dflash/py.typed" in names
    pairs = {name.split("/")[2] for name in names if name.startswith("sglang_dflash/demo_models/")}
    assert pairs == {"dense"}
    assert wheel.stat().st_size < 12_000_000


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel. It finds the wheel's dependencies in this
    environment, and neither the checkout nor its entry points."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    made = home / "bin/python"
    install = ["uv", "pip", "install", "-q", "--offline", "--no-deps", "--python", made, wheel]
    subprocess.run(install, check=True)
    (packages,) = home.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


@pytest.fixture
def run(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-W", "ignore", "-m", "sglang_dflash", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_its_commands_work_away_from_the_checkout(run: Run, python: Path) -> None:
    target, draft = run("demo-models", "dense").stdout.splitlines()
    assert Path(target).is_relative_to(python.parents[1]) and Path(draft, "config.json").is_file()
    shown = run("inspect", target, draft)
    assert shown.returncode == 0 and shown.stdout.startswith("served by sglang-dflash")
    told = run("env", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["worker"] == "sglang-dflash"
    assert found["platform"] == "PlainCpuPlatform"
    made = run("generate", "--prompt", "import os", "--max-new-tokens", "8", "--json")
    assert len(json.loads(made.stdout)["tokens"]) == 8, made.stderr
    refused = run("demo-models", "hybrid")
    assert refused.returncode == 1
    assert "'hybrid'; choose one of dense; a checkout has all" in refused.stderr


@pytest.mark.long
def test_its_worker_serves_away_from_the_checkout(
    run: Run, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = run("demo-models", "dense").stdout.splitlines()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    pair = {"--model-path": target, "--speculative-draft-model-path": draft}
    with Server(ServerConfig({**pair, "--speculative-algorithm": "DFLASH"})) as server:
        text = 'def fnmatch(name, pat):\n    """Test whether FILENAME'
        server.generate(text, temperature=0, max_new_tokens=32, ignore_eos=True)
        assert server.dflash()["acceptance_length"] > 2
