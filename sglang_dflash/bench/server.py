"""An SGLang server as our child process: started, waited for, and ended."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from sglang_dflash.bench.server_config import LAUNCH_SERVER, ServerConfig


class ServerFailed(RuntimeError):
    """The server process ended, or did not answer in time. The message holds the end of its log."""


def free_port() -> int:
    """A free port below the range for outgoing connections.

    A starting server opens some of those itself, and could take the port before it listens on it.
    """
    for port in random.sample(range(20000, 30000), 50):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerFailed("no free port found between 20000 and 29999")


def _check_free(port: int) -> None:
    with socket.socket() as s:
        # As the server binds it: connections of one that has just ended do not count.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerFailed(
                f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose another"
            ) from error


class Server:
    """A server on 127.0.0.1. As a context manager it ends the process it started.

    Args:
        config: what to start; or a plain list of arguments, with `env` and `module` beside it.
        timeout_s: how long `wait` waits, in seconds.
        log: file that gets the server's output; a temporary one by default.
        port: a free one by default.

    Raises:
        ServerFailed: the given port is taken.
    """

    def __init__(
        self,
        config: ServerConfig | Sequence[str],
        env: dict[str, str] | None = None,
        timeout_s: float = 300,
        log: Path | None = None,
        module: str = LAUNCH_SERVER,
        port: int | None = None,
    ) -> None:
        if not isinstance(config, ServerConfig):
            config = ServerConfig(extra_args=tuple(config), env=env or {}, module=module)
        elif env is not None or module != LAUNCH_SERVER:
            raise TypeError("env and module: a ServerConfig holds its own")
        self.config = config
        if port is not None:
            _check_free(port)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.args, self.timeout_s, self.module = config.args(), timeout_s, config.module
        self.log = log or Path(tempfile.mkstemp(prefix="sglang-server-", suffix=".log")[1])
        self._env = {**os.environ, **config.env}

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait()
        except BaseException:
            # Ctrl-C too: `__exit__` does not run if `__enter__` raises.
            self.stop()
            raise
        return self

    def start(self) -> None:
        """Start the process; `wait` tells when it serves."""
        command = [
            sys.executable,
            "-m",
            self.module,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *self.args,
        ]
        # A session of its own, so that its children end with it.
        self.process = subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._env,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Raise ServerFailed unless the server answers within `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(
                    f"the server ended with status {self.process.returncode}:\n{self.log_tail()}"
                )
            try:
                # 200 only once the warm-up request has been answered.
                healthy = requests.get(f"{self.url}/health", timeout=5).ok
                if healthy and "ready to roll" in self.log.read_text(errors="replace"):
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.stop()
        raise ServerFailed(
            f"the server did not answer within {self.timeout_s:.0f} s:\n{self.log_tail()}"
        )

    def stop(self) -> None:
        """End the process and its children."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._end_children()

    def _end_children(self) -> None:
        """End the rest of the process session: SGLang's children outlive a killed launcher."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def generate(self, prompt: str | list[int], **sampling: Any) -> dict[str, Any]:
        """POST /generate of a text or of token ids, with SGLang's sampling parameters.

        Raises:
            requests.HTTPError: the server refused.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        response = requests.post(
            f"{self.url}/generate", json={key: prompt, "sampling_params": sampling}, timeout=600
        )
        response.raise_for_status()
        return response.json()

    def info(self) -> dict[str, Any]:
        """GET /server_info."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()

    def dflash(self) -> dict[str, Any]:
        """Our worker's report, from /server_info; empty if another worker serves."""
        return self.info()["internal_states"][0].get("dflash", {})


@contextmanager
def together(servers: Iterable[Server]) -> Iterator[None]:
    """Start all of them side by side, wait for all, and end all. Raises ServerFailed."""
    started: list[Server] = []
    try:
        for server in servers:
            server.start()
            started.append(server)
        for server in started:
            server.wait()
        yield
    finally:
        for server in started:
            server.stop()
