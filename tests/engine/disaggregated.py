"""A prefill and a decode server behind SGLang's router, on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_dflash.bench.server import Server, free_port
from sglang_dflash.bench.server import together as side_by_side
from tests.engine.router import post, router
from tests.engine.servers import ServerConfig
from tests.engine.session import ServerSession


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
    bootstrap = free_port()
    first, second = roles(config, bootstrap)[0], roles(decode or config, bootstrap)[1]
    servers = [session.own(of) for of in (first, second)]
    with side_by_side(servers), pair_router(servers[0], servers[1], bootstrap) as url:
        yield Pair(servers[0], servers[1], bootstrap, url)


def pair_router(prefill: Server, decode: Server, bootstrap: int) -> AbstractContextManager[str]:
    """The address of SGLang's router before a prefill and a decode server."""
    return router(
        "--disable-retries", "--pd-disaggregation", "--prefill", prefill.url, str(bootstrap),
        "--decode", decode.url,
    )  # fmt: skip
