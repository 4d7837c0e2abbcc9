"""Server processes end however their context ends, and `ServerConfig` names a server."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_dflash.tools.bench.server import Server, ServerConfig, demo_config, together
from sglang_dflash.tools.demo_pairs.pairs import demo_pair


class Interrupted(Server):
    """Interrupted while it starts."""

    def start(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def wait(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_start_leaves_nothing_behind() -> None:
    server = Interrupted(ServerConfig())
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert server.process.poll() is not None


class Stubborn(Server):
    """Ignores SIGTERM, as its child does."""

    def start(self) -> None:
        command = "trap '' TERM; sleep 60 & echo $!; wait"
        self.process = subprocess.Popen(
            ["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())

    def wait(self) -> None:
        """It serves."""


def test_a_second_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends the context, the second comes while the first of two servers ends."""
    waited = subprocess.Popen.wait
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]

    def wait(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        if timeout is not None and interrupts:
            raise interrupts.pop()
        return waited(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    servers = [Stubborn(ServerConfig()), Stubborn(ServerConfig())]
    with pytest.raises(KeyboardInterrupt), together(servers):
        raise KeyboardInterrupt
    children = [psutil.Process(server.child) for server in servers if alive(server.child)]
    _, left = psutil.wait_procs(children, timeout=10)
    for process in left:
        process.kill()
    assert not left and all(server.process.returncode is not None for server in servers)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Unlucky(Server):
    """Another program takes its first port before it listens. It does not end, as SGLang does not
    by uvicorn's message."""

    ports: tuple[int, ...] = ()

    def start(self) -> None:
        self.ports += (self.port,)
        said = "serving" if len(self.ports) > 1 else BIND
        self.process = subprocess.Popen(
            ["sh", "-c", f"echo {shlex.quote(said)}; exec sleep 60"],
            stdout=self.log.open("w"),
            start_new_session=True,
        )


class Serving(ServerConfig):
    def serves(self, url: str, log: Path) -> bool:
        return "serving" in log.read_text()


BIND = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 22268): in use"


def test_a_server_whose_port_was_taken_gets_another() -> None:
    with Unlucky(Serving(), timeout_s=30) as server:
        assert len(server.ports) == len(set(server.ports)) == 2
        assert server.url.endswith(str(server.ports[1]))


SIGTERM = """
import subprocess
from sglang_dflash.tools.bench.server import (Server, ServerConfig, sigterm_as_exit, together)

class Sleeping(Server):
    def start(self):
        self.process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def wait(self):
        print(self.process.pid, flush=True)
        self.process.wait()

with sigterm_as_exit(), together([Sleeping(ServerConfig())]):
    pass
"""


def test_servers_end_with_a_command_that_is_terminated() -> None:
    command = [sys.executable, "-c", SIGTERM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(server)


def test_a_configuration_renders_its_flags_in_order() -> None:
    config = ServerConfig(
        {"--b": 1, "--switch": True, "--several": ("x", 2), "--a": "0.200"},
        extra_args=("--a", "last"),
    )
    assert config.args() == [
        *("--b", "1", "--switch", "--several", "x", "2", "--a", "0.200"),
        *("--a", "last"),
    ]


def test_a_changed_flag_keeps_its_place_and_the_original_its_value() -> None:
    config = ServerConfig({"--a": 1, "--b": 2})
    changed = config.with_flags({"--c": 3, "--a": 9})
    assert changed.args() == ["--a", "9", "--b", "2", "--c", "3"]
    assert changed.without_flags("--a", "--c").args() == ["--b", "2"]
    assert config.args() == ["--a", "1", "--b", "2"]


def test_demo_servers_have_pools_for_their_kind_of_layers() -> None:
    plain, drafting = (demo_config(demo_pair("dense"), dflash=dflash) for dflash in (False, True))
    assert "--speculative-algorithm" not in plain.flags
    assert drafting.flags["--speculative-algorithm"] == "DFLASH"
    assert "--max-mamba-cache-size" not in drafting.flags
    assert "--max-mamba-cache-size" in demo_config(demo_pair("hybrid"), dflash=False).flags
