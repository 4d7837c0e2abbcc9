"""An SGLang server as our child process: configured, started, waited for, and ended.

Loads without `requests` and SGLang: experiments run on bare machines too.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from sglang_dflash.facts.embedded import DemoPair
from sglang_dflash.facts.errors import Failed

# True is a flag without a value; a tuple is a flag with several.
FlagValue = str | int | float | bool | tuple[str | int | float, ...]


@dataclass(frozen=True)
class ServerConfig:
    """One server to start.

    Attributes:
        flags: flag -> value, in the order of the command line. True is a flag without a value.
        extra_args: arguments that follow the flags as they are; of a repeated flag SGLang takes
            the last.
        env: environment variables on top of ours.
        module: what `python -m` runs.
    """

    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = "sglang.launch_server"

    def args(self) -> list[str]:
        """The command line after `python -m MODULE`."""
        rendered: list[str] = []
        for name, value in self.flags.items():
            rendered.append(name)
            if value is not True:
                values = value if isinstance(value, tuple) else (value,)
                rendered += map(str, values)
        return [*rendered, *self.extra_args]

    def with_flags(self, flags: Mapping[str, FlagValue]) -> Self:
        """The same server with these flags set; a flag that was set keeps its place."""
        return replace(self, flags={**self.flags, **flags})

    def without_flags(self, *names: str) -> Self:
        """The same server without these flags."""
        return replace(self, flags={k: v for k, v in self.flags.items() if k not in names})


def dflash_flags(draft: str) -> dict[str, FlagValue]:
    """Flags that make a server draft whole blocks with the checkpoint `draft`, in every step."""
    return {
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": draft,
        "--speculative-dflash-width": "fixed",
    }


def dtype_flags(dtype: str, accelerator: bool) -> dict[str, FlagValue]:
    """Flags of a server that computes in `dtype`. On a GPU, the attention backends that SGLang
    takes by itself (FA3, TRT-LLM, FlashInfer) serve 16 bits only."""
    attention = {"--attention-backend": "triton"} if accelerator and dtype == "float32" else {}
    return {"--dtype": dtype, **attention}


def demo_config(pair: DemoPair, *, dflash: bool, accelerator: bool = False) -> ServerConfig:
    """A server of an embedded pair: float32, small pools, no busy waiting."""
    flags: dict[str, FlagValue] = {
        "--model-path": str(pair.target),
        **dtype_flags("float32", accelerator),
        "--max-total-tokens": 16384,
        "--sleep-on-idle": True,
    }
    if pair.is_hybrid:
        flags |= {"--max-mamba-cache-size": 96, "--max-running-requests": 16}
    return ServerConfig(flags | dflash_flags(str(pair.draft)) if dflash else flags)


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
    raise Failed("no free port found between 20000 and 29999")


class Server:
    """A server on a free port of 127.0.0.1. As a context manager it ends the process it started.

    Args:
        config: what to start.
        timeout_s: how long `wait` waits, in seconds.
        log: file that gets the server's output; a temporary one by default.
    """

    def __init__(
        self, config: ServerConfig, timeout_s: float = 300, log: Path | None = None
    ) -> None:
        self.config, self.timeout_s = config, timeout_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.args = config.args()
        self.log = log or Path(tempfile.mkstemp(prefix="sglang-server-", suffix=".log")[1])
        self._env = {**os.environ, **config.env}

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait()
        except BaseException:
            # Ctrl-C too: `__exit__` does not run if `__enter__` raises.
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; `wait` tells when it serves."""
        at = ["--host", "127.0.0.1", "--port", str(self.port)]
        # A session of its own, so that its children end with it.
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.config.module, *at, *self.args],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._env,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Raise Failed unless the server answers within `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Failed(
                    f"the server ended with status {self.process.returncode}:\n{self._log_tail()}"
                )
            # Written once the warm-up request has been answered.
            if "ready to roll" in self.log.read_text(errors="replace"):
                return
            time.sleep(0.2)
        self.stop()
        raise Failed(
            f"the server did not answer within {self.timeout_s:.0f} s:\n{self._log_tail()}"
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

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def generate(self, prompt: str | list[int], **sampling: Any) -> dict[str, Any]:
        """POST /generate of a text or of token ids, with SGLang's sampling parameters.

        Raises:
            requests.HTTPError: the server refused.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        body = {key: prompt, "sampling_params": sampling}
        return self._request("POST", "/generate", json=body).json()

    def info(self) -> dict[str, Any]:
        """GET /server_info."""
        return self._request("GET", "/server_info").json()

    def dflash(self) -> dict[str, Any]:
        """Our worker's report, from /server_info; empty if another worker serves."""
        return self.info()["internal_states"][0].get("dflash", {})

    def _request(self, method: str, path: str, **how: Any) -> Any:
        import requests

        response = requests.request(method, f"{self.url}{path}", timeout=600, **how)
        response.raise_for_status()
        return response


@contextmanager
def together(servers: Iterable[Server]) -> Iterator[None]:
    """Start all of them side by side, wait for all, and end all. Raises Failed."""
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


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that servers end with this process as they do on Ctrl-C: they
    have sessions of their own, which it does not reach. For the main thread only."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
