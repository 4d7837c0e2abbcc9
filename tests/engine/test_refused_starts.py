"""A server that is started with what it cannot serve ends with one line and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_dflash.common.errors import Failed
from sglang_dflash.tools.bench.server import ServerConfig
from tests.broken_drafts import BROKEN, PAIR, fields, server_flags
from tests.conftest import FUZZ
from tests.engine import client
from tests.engine.nursery import ForkedServer
from tests.engine.session import ServerSession
from tests.serving.start.test_draft_verdicts import damaged

# From the line to the end. Not by the clock, since the machine may be busy with other tests.
CPU_SECONDS = 20
MOST_SECONDS = 400
DAMAGED = 12
# With a key of Domino: SGLang's worker gets it.
OF_ANOTHER_KIND = 24
# A scheduler's first line.
SCHEDULER = "Init torch distributed begin"


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its status, its lines, and its CPU seconds since one of them."""

    status: int
    lines: list[str]
    seconds_since: float

    def lines_with(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]


def launched(*flags: str, until: str) -> Ended:
    """Run the launcher. `until` is part of the line from which CPU seconds are counted."""
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *flags]
    process = subprocess.Popen(
        [*command, "--port", "39999"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # A server that serves would never end.
    limit = threading.Timer(MOST_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    lines, seen = [], 0.0
    for line in process.stdout or ():
        lines.append(line.rstrip("\n"))
        if until in line:
            seen = sum(psutil.Process(process.pid).cpu_times()[:2])
    _, status, used = os.wait4(process.pid, 0)
    limit.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, lines, used.ru_utime + used.ru_stime - seen)


BROKEN_DRAFTS = ("field: hidden_size=256", "file: nested", "tensors: one NaN")
# A broken draft or flags -> the status, and a part of the last line.
ENDS: dict[str | tuple[str, str], tuple[int, str]] = {
    **{what: (1, BROKEN[what].message) for what in BROKEN_DRAFTS},
    ("--speculative-num-draft-tokens", "99999999999"): (
        1, "sglang-dflash: --speculative-num-draft-tokens: 99999999999; a number of tokens from 2",
    ),
    ("--mamba-scheduler-strategy", "bogus"): (
        2, "--mamba-scheduler-strategy: 'bogus'; choose one of",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("what", ENDS, ids=str)
def test_the_launcher_ends_soon_after_one_line(what: Any, tmp_path: Path) -> None:
    status, message = ENDS[what]
    is_draft = isinstance(what, str)
    draft = BROKEN[what].make(tmp_path / "draft") if is_draft else PAIR.draft
    ended = launched(*server_flags(*(() if is_draft else what), draft=draft), until=message)
    assert ended.status == status and ended.seconds_since < CPU_SECONDS
    assert not ended.lines_with("Traceback")
    (line,) = ended.lines_with(message)
    assert line == ended.lines[-1] and (status == 2 or line.startswith("sglang-dflash: "))


def test_a_broken_draft_is_refused_in_one_line(tmp_path: Path, servers: ServerSession) -> None:
    draft = BROKEN["field: hidden_size=256"]
    command = ["sglang.launch_server", *server_flags(draft=draft.make(tmp_path / "draft"))]
    status, lines = servers.nursery.run(*command, log=tmp_path / "log")
    assert status == 1 and not [line for line in lines if "Traceback" in line]
    (line,) = [line for line in lines if draft.message in line]
    assert line.startswith("sglang-dflash: ") and line == lines[-1]


def test_what_only_the_scheduler_knows_ends_the_server(
    tmp_path: Path, servers: ServerSession
) -> None:
    """The size of the KV pool: here it follows from the machine's memory."""
    draft, log = BROKEN["field: hidden_size=256"].make(tmp_path / "draft"), tmp_path / "log"
    fields(hidden_size=192, block_size=8_500)(draft)
    servers.stop()
    # More requests, longer blocks or float32 need more memory than there is, which is found before.
    args = server_flags("--max-running-requests", "2", "--dtype", "bfloat16", draft=draft)
    config = ServerConfig(extra_args=tuple(args))
    server = ForkedServer(servers.nursery, config, log=log)
    with pytest.raises(Failed):
        server.__enter__()
    assert server.process.poll() not in (None, 0)
    lines = log.read_text().splitlines()
    assert not [line for line in lines if "Traceback" in line]
    (line,) = [
        line for line in lines if "sglang-dflash: ERROR: --speculative-num-draft-tokens" in line
    ]
    assert "8500; too large for a KV pool of" in line and "give at most" in line


@pytest.mark.long
def test_no_draft_is_refused_later_than_by_the_launcher(
    tmp_path: Path, servers: ServerSession
) -> None:
    """Damaged drafts that the launcher accepts serve a request, by our worker or SGLang's."""
    servers.stop()
    served, wrong = 0, []
    numbers = {*range(DAMAGED * FUZZ), OF_ANOTHER_KIND}
    for number in numbers:
        (folder, what), log = damaged(number, tmp_path), tmp_path / f"log{number}"
        config = ServerConfig(extra_args=tuple(server_flags(draft=folder)))
        server = ForkedServer(servers.nursery, config, log=log)
        try:
            with server:
                client.ask(server, "x = ")
            served += 1
        except Failed:
            lines = log.read_text(errors="replace").splitlines()
            if not lines[-1].startswith("sglang-dflash: ") or any(SCHEDULER in it for it in lines):
                wrong.append(f"{what}: {lines[-3:]}")
    print(f"{served} of {len(numbers)} served")
    assert not wrong, "\n".join(wrong)
    assert served
