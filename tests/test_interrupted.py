"""An interrupted test session leaves no server behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

# A session with a server of its nursery, which has a child, as SGLang's have.
SERVER = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""
SESSION = """
import os, sys, time
from dataclasses import dataclass
from pathlib import Path
from sglang_dflash.tools.bench.server import ServerConfig
from tests.engine.nursery import Nursery
from tests.engine.session import ServerSession

@dataclass(frozen=True)
class Config(ServerConfig):
    nursery: tuple[str, ...] = ("tests.small_nursery",)

    def serves(self, url, log):
        return bool(log.read_text())

folder, module = sys.argv[1:]
session = ServerSession(Path(folder))
try:
    server = session.server(Config(module=module))
    print(server.process.pid, server.log.read_text(), flush=True)
    time.sleep(600)
finally:
    session.close()
"""


def to_all(session: subprocess.Popen[str]) -> None:
    """Send Ctrl-C as a terminal does: to the nursery, too."""
    os.killpg(session.pid, signal.SIGINT)


INTERRUPTS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "Ctrl-C": to_all,
    "SIGKILL": lambda session: session.kill(),
}


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_servers_end_with_an_interrupted_session(interrupt: str, tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    command = [sys.executable, "-W", "ignore", "-c", SESSION, str(tmp_path), str(server)]
    # A shell's background job would ignore SIGINT, and what it starts, too.
    session = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert session.stdout is not None
    started = [psutil.Process(int(pid)) for pid in session.stdout.readline().split()]
    assert len(started) == 2
    INTERRUPTS[interrupt](session)
    session.communicate(timeout=60)
    _, alive = psutil.wait_procs(started, timeout=30)
    for process in alive:
        process.kill()
    assert not alive
