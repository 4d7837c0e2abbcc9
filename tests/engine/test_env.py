"""`sglang-dflash env`: its report of this installation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_dflash.cli import env
from sglang_dflash.serving.seams import SEAMS
from tests.engine.servers import PAIR
from tests.engine.session import ServerSession


def test_this_installation_serves_with_our_worker(servers: ServerSession, tmp_path: Path) -> None:
    pair = ["--target", str(PAIR.target), "--draft", str(PAIR.draft)]
    command = ["sglang_dflash", "env", "--json", *pair]
    status, lines = servers.nursery.run(*command, log=tmp_path / "log")
    assert status == 0, lines
    report = json.loads(lines[-1])
    assert report["worker"] == "sglang-dflash" and "serves this pair" in report["reason"]
    assert report["versions"]["sglang"] == "0.5.23"
    rows = report["seams"]
    by_table = {
        table: {row["state"] for row in rows if row["table"] == table}
        for table in ("serving", "replay", "repairs", "platform_cpu")
    }
    # All that they change was imported before the fork.
    assert by_table["serving"] == by_table["repairs"] == {"applied"}
    assert by_table["replay"] == {"not applied"}
    if not torch.accelerator.is_available():
        assert report["platform"] == "PlainCpuPlatform"
        assert by_table["platform_cpu"] == {"applied"}
    text = env.as_text(report)
    assert text.startswith("worker: sglang-dflash\nwhy: it serves this pair")
    assert f"  serving: {len(SEAMS)} of {len(SEAMS)} applied\n" in text
    assert "  replay: 5 of 5 can be applied" in text
    _, lines = servers.nursery.run(*command, log=tmp_path / "log", SGLANG_PLUGINS="dflash_cpu")
    told = json.loads(lines[-1])
    assert told["worker"] == env.BUILTIN and "SGLANG_PLUGINS" in told["reason"]
