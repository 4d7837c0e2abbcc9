"""The faked GPU itself refuses, counts and computes as a GPU does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.engine.session import ServerSession
from tests.fake_gpu import servers as g


@pytest.mark.xdist_group(str(g.DFLASH))
def test_it_behaves_as_a_gpu(servers: ServerSession, tmp_path: Path) -> None:
    """See the claims: they run in a process of their own."""
    nursery = servers.nursery_of(g.PLAIN)
    command = "tests.fake_gpu.claims"
    status, lines = nursery.run(command, log=tmp_path / "log", **g.PLAIN.env)
    assert status == 0, lines
    outcomes = json.loads(lines[-1])
    assert len(outcomes) == 13
    assert not {name: how for name, how in outcomes.items() if how is not None}


@pytest.mark.long
def test_tests_of_kernels_choose_operations_by_its_device() -> None:
    """Only tests in float32: it rounds bfloat16 otherwise than a real GPU."""
    tests = (f"tests/kernels/test_{name}.py" for name in ("smallest_server", "gated_delta_fold"))
    command = [sys.executable, "-W", "ignore", "-m", "tests.fake_gpu", "pytest", "-q", *tests]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "skipped" in done.stdout, "the interpreter's bytes are counted: this is no GPU"
