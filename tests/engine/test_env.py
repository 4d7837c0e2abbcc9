"""`sglang-dflash env`: its report of this installation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_dflash.tools.cli import env
from tests.engine.session import ServerSession


def test_this_installation_serves_with_our_worker(servers: ServerSession, tmp_path: Path) -> None:
    command = ["sglang_dflash", "env", "--json"]
    status, lines = servers.nursery.run(*command, log=tmp_path / "log")
    assert status == 0, lines
    report = json.loads(lines[-1])
    assert report["worker"] == "sglang-dflash" and "inspect" in report["reason"]
    assert report["versions"]["sglang"] == "0.5.23"
    if not torch.accelerator.is_available():
        assert report["platform"] == "PlainCpuPlatform"
    assert env.as_text(report).startswith("worker: sglang-dflash\nwhy: installed and loaded")
    _, lines = servers.nursery.run(*command, log=tmp_path / "log", SGLANG_PLUGINS="dflash_cpu")
    told = json.loads(lines[-1])
    assert told["worker"] == env.SGLANG_WORKER and "SGLANG_PLUGINS" in told["reason"]
