"""The faked GPU itself refuses, counts and computes as a GPU does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    assert len(outcomes) == 12
    assert not {name: how for name, how in outcomes.items() if how is not None}
