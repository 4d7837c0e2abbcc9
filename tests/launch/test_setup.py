"""`launch/setup.sh` in an environment that was made by hand, without uv."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests import ROOT

# In place of .venv/bin/python: it notes what is asked, and has uv once pip has installed it.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "{log}"
case "$*" in
    "-m pip install -q uv") touch "{uv}" ;;
    "-m uv"*) [ -e "{uv}" ] ;;
esac
"""


def test_an_environment_without_uv_gets_it(tmp_path: Path) -> None:
    root, log, uv = tmp_path / "checkout", tmp_path / "log", tmp_path / "uv"
    (root / "launch").mkdir(parents=True)
    (root / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "launch/setup.sh", root / "launch")
    python = root / ".venv/bin/python"
    python.write_text(PYTHON.format(log=log, uv=uv))
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (root / name).touch()
    for _ in range(2):
        command = ["bash", "-c", 'source launch/setup.sh "[dev]"']
        subprocess.run(command, cwd=root, check=True)
    asked = log.read_text().splitlines()
    assert asked[:2] == ["-m uv --version", "-m pip install -q uv"]
    assert asked[2].startswith("-m uv pip install -q") and asked[2].endswith(f"-e {root}[dev]")
    assert len(asked) == 3, "installed again although nothing has changed"
