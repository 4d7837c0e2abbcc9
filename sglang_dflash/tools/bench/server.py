"""A server as our child process: configured, started, waited for, and ended.

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from sglang_dflash.common.errors import Failed
from sglang_dflash.tools.demo_pairs.pairs import DemoPair

if TYPE_CHECKING:
    from sglang_dflash.tools.bench.load import Endpoint

# True is a flag without a value; a tuple is a flag with several.
FlagValue = str | int | float | bool | tuple[str | int | float, ...]


# Tokens in the KV cache of a demo pair's server.
KV_TOKENS = 16384


def render_flags(flags: Mapping[str, FlagValue]) -> list[str]:
    """Flags as words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(name)
        if value is not True:
            words += map(str, value if isinstance(value, tuple) else (value,))
    return words


class Program(Protocol):
    """A kind of server to start."""

    def command(self, port: int) -> list[str]:
        """Return the command that starts a server on that port of 127.0.0.1."""

    def environment(self) -> dict[str, str]:
        """All environment variables of its process."""

    def serves(self, url: str, log: Path) -> bool:
        """Return whether the server is ready for requests."""

    def explain_failure(self, how: str, log: Path) -> str:
        """Return a message that says why the server is not ready, from its log.

        Args:
            how: the state of its process, such as "ended with status 1".
        """

    def endpoint(self, url: str, log: Path) -> Endpoint:
        """Return the endpoint that requests go to."""


@dataclass(frozen=True)
class ServerConfig:
    """One SGLang server to start: a `Program`.

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
        return [*render_flags(self.flags), *self.extra_args]

    def command(self, port: int) -> list[str]:
        at = ["--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-m", self.module, *at, *self.args()]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def serves(self, url: str, log: Path) -> bool:
        # SGLang logs this line when its warm-up request has been answered.
        return "ready to roll" in log.read_text(errors="replace")

    def explain_failure(self, how: str, log: Path) -> str:
        tail = log.read_text(errors="replace").splitlines()[-25:]
        return "\n".join([f"the server {how}:", *tail])

    def endpoint(self, url: str, log: Path) -> Endpoint:
        from sglang_dflash.tools.bench.load import SGLang

        return SGLang(url, log=log)

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


def default_dtype(accelerator: bool) -> str:
    """Return the default dtype of servers: float32, in which outputs must be equal; bfloat16 on a
    GPU, where SGLang's kernels take 16 bits only."""
    return "bfloat16" if accelerator else "float32"


def demo_config(pair: DemoPair, *, dflash: bool, accelerator: bool = False) -> ServerConfig:
    """A server of an embedded pair: small pools, no busy waiting."""
    flags: dict[str, FlagValue] = {
        "--model-path": str(pair.target),
        "--dtype": default_dtype(accelerator),
        "--max-total-tokens": KV_TOKENS,
        "--sleep-on-idle": True,
    }
    if pair.is_hybrid:
        flags |= {"--max-mamba-cache-size": 96, "--max-running-requests": 16}
    return ServerConfig(flags | dflash_flags(str(pair.draft)) if dflash else flags)


# Log lines of a server whose port is taken: uvicorn's, which then waits forever, and that of our
# own check.
_PORT_TAKEN = ("error while attempting to bind on address", "another program listens there")


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


class ServerProcess:
    """A server on a free port of 127.0.0.1. As a context manager it ends the process it started.

    Args:
        config: what to start.
        timeout_s: how long `wait` waits, in seconds.
        log: file that gets the server's output; a temporary one by default.
    """

    def __init__(self, config: Program, timeout_s: float = 300, log: Path | None = None) -> None:
        self.config, self.timeout_s = config, timeout_s
        self._choose_port()
        self.log = log or Path(tempfile.mkstemp(prefix="server-", suffix=".log")[1])

    def _choose_port(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

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
        # A session of its own, so that its children end with it.
        self.process = subprocess.Popen(
            self.config.command(self.port),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self.config.environment(),
            start_new_session=True,
        )

    def wait(self) -> None:
        """Raise Failed unless the server answers within `timeout_s`. If another program has taken
        the port meanwhile, the server is started again on another one."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            log = self.log.read_text(errors="replace")
            if any(words in log for words in _PORT_TAKEN):
                self.stop()
                self.log.write_text("")
                self._choose_port()
                self.start()
            if self.process.poll() is not None:
                self._fail(f"ended with status {self.process.returncode}")
            if self.config.serves(self.url, self.log):
                return
            time.sleep(0.2)
        self.stop()
        self._fail(f"did not answer within {self.timeout_s:.0f} s")

    def _fail(self, how: str) -> NoReturn:
        raise Failed(self.config.explain_failure(how, self.log))

    def stop(self) -> None:
        """End the process and its children."""
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(30)
        finally:
            # After a second Ctrl-C, too.
            self._end_session()

    def _end_session(self) -> None:
        """Kill what is left of the process session: SGLang's children outlive a killed launcher."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Server(ServerProcess):
    """An SGLang server, with requests of its own API."""

    config: ServerConfig

    def __init__(
        self, config: ServerConfig, timeout_s: float = 300, log: Path | None = None
    ) -> None:
        super().__init__(config, timeout_s, log)

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
def together(servers: Iterable[ServerProcess]) -> Iterator[None]:
    """Start all servers at once, wait for all, and end all. Raises Failed."""
    with ExitStack() as started:
        waiting = list[ServerProcess]()
        for server in servers:
            server.start()
            # All of these are called, whatever ends them.
            started.callback(server.stop)
            waiting.append(server)
        for server in waiting:
            server.wait()
        yield


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that servers end with this process as they do on Ctrl-C.
    They run in sessions of their own, which the signal does not reach. Main thread only."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
