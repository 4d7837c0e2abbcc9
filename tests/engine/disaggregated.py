"""A prefill and a decode server behind SGLang's router, on one machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_dflash.bench.server import Server, free_port
from sglang_dflash.bench.server import together as side_by_side
from tests.engine.nursery import ForkedServer
from tests.engine.servers import ServerConfig
from tests.engine.session import ServerSession

BOUND = 120


@dataclass(frozen=True)
class Pair:
    """Attributes:
    bootstrap: the prefill server's port for decode servers.
    url: the router's.
    """

    prefill: Server
    decode: Server
    bootstrap: int
    url: str

    def generate(self, prompt: str | list[int], **sampling: Any) -> dict[str, Any]:
        """As `Server.generate`."""
        response = post(self.url, prompt, **sampling)
        response.raise_for_status()
        return response.json()


def post(url: str, prompt: str | list[int], **sampling: Any) -> requests.Response:
    key = "text" if isinstance(prompt, str) else "input_ids"
    body = {key: prompt, "sampling_params": sampling}
    return requests.post(f"{url}/generate", json=body, timeout=BOUND)


def roles(config: ServerConfig, bootstrap: int) -> tuple[ServerConfig, ServerConfig]:
    """The prefill and the decode server of a configuration."""
    # Seconds between two questions whether the prefill server is alive.
    env = {
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_FORCE_TCP": "true",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2.0",
    }
    both = config.with_env(**env).having(disaggregation_transfer_backend="mooncake")
    return (
        both.having(disaggregation_mode="prefill", disaggregation_bootstrap_port=bootstrap),
        both.having(disaggregation_mode="decode", disaggregation_decode_retraction_backup="none"),
    )


@contextmanager
def disaggregated(
    session: ServerSession, config: ServerConfig, decode: ServerConfig | None = None
) -> Iterator[Pair]:
    """A pair of servers of that configuration; the decode server of another one if given."""
    session.stop()
    bootstrap = free_port()
    first, second = roles(config, bootstrap)[0], roles(decode or config, bootstrap)[1]
    servers = [
        ForkedServer(session.nursery, session.arguments(of), env=of.env, module=of.module)
        for of in (first, second)
    ]
    with side_by_side(servers), router(servers[0], servers[1], bootstrap) as url:
        yield Pair(servers[0], servers[1], bootstrap, url)


@contextmanager
def router(prefill: Server, decode: Server, bootstrap: int) -> Iterator[str]:
    """The router's address, once an answer comes through both."""
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(free_port()), "--disable-retries",
        "--pd-disaggregation", "--prefill", prefill.url, str(bootstrap), "--decode", decode.url,
    ]  # fmt: skip
    log = Path(tempfile.mkstemp(prefix="sglang-router-", suffix=".log")[1])
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + BOUND
    try:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(requests.RequestException):
                if post(url, "x = ", temperature=0, max_new_tokens=2).ok:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-2000:])
        yield url
    finally:
        process.terminate()
        process.wait(30)
