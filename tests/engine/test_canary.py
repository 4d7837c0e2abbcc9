"""SGLang's KV canary beside our worker: every target slot holds the token that was written to it.

The canary keeps a token id, a position and a hash of the K/V beside each slot. It checks those of
every request at every forward, and now and then those of the whole prefix cache. On a CPU its
kernels run in torch, two of them in Triton's interpreter, which needs a process that has not loaded
Triton before.
"""

from __future__ import annotations

import re

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.engine import client, workload
from tests.engine.servers import DFLASH, TIGHT, ServerConfig
from tests.engine.session import ServerSession


def watched(config: ServerConfig, mode: str) -> ServerConfig:
    return config.named("canary").having(
        kv_canary=mode, kv_canary_sweep_interval=20, kv_canary_real_data="partial"
    )


def canary_log(servers: ServerSession, config: ServerConfig, **env: str) -> str:
    """The server's log after some requests of every kind."""
    servers.stop()
    config = config.with_env(TRITON_INTERPRET="1", **env)
    with Server(servers.filled(config)) as server:
        workload.run_some(server, 4)
        client.at_rest(server)
        return server.log.read_text(errors="replace")


def counts(log: str) -> tuple[int, int, int]:
    """Tokens protected, sweeps and violations, by the last line that has them."""
    found = re.findall(r"protected_tokens=(\d+) sweep_passes=(\d+) violations=(\d+)", log)
    tokens, sweeps, violations = map(int, found[-1])
    return tokens, sweeps, violations


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", [DFLASH, TIGHT], ids=str)
def test_every_slot_holds_its_token(config: ServerConfig, servers: ServerSession) -> None:
    """Requests are retracted every 25 steps, too. A violation would end the server."""
    tokens, sweeps, violations = counts(canary_log(servers, watched(config, "raise")))
    assert tokens > 50_000 and sweeps > 5 and violations == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_changed_table_is_found(servers: ServerSession) -> None:
    """The comparison can fail: SGLang's own switch puts wrong slots into the table."""
    log = canary_log(
        servers, watched(DFLASH, "log"), SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB="0.2"
    )
    assert counts(log)[2] > 0
