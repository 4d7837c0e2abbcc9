"""Real servers fill the memory that is free to the token, with the states that the flags come to.
(Of many flags, the sizing alone: tests/serving/start/test_pool_sizes.py.)"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.memory import sizes
from sglang_dflash.memory.pools import StateDemand, carried_requests, default_states, sglang_states
from sglang_dflash.memory.sizes import Charge, GroupKVSize
from sglang_dflash.tools.bench.server import Server
from tests.engine.servers import HYBRID_PAIR, HYBRID_PAIR_DFLASH, HYBRID_PAIR_PLAIN, ServerConfig

GIB = 2**30
# What a thirty-second of the machine leaves the pools.
FREE, REQUESTS, BLOCK, WINDOW = GIB // 16, 16, 8, 64
MEMORY: dict[str, Any] = {
    "max_total_tokens": None,
    "max_mamba_cache_size": None,
    "mem_fraction_static": 1 / 32,
    "max_running_requests": REQUESTS,
}


def sized(config: ServerConfig, name: str) -> ServerConfig:
    """Return the config for a machine of 2 GiB, with nothing kept for pictures."""
    changed = config.named(name).changed("of_two_gib").having(**MEMORY)
    return changed.with_env(SGLANG_VLM_CACHE_SIZE_MB="0")


PLAIN = sized(HYBRID_PAIR_PLAIN, "pools-plain")
OURS = sized(HYBRID_PAIR_DFLASH, "pools").having(speculative_draft_window_size=WINDOW)
BY_RATIO = OURS.named("pools-by-ratio").having(mamba_full_memory_ratio=0.9)
GIVEN = OURS.named("pools-given").having(max_mamba_cache_size=60)
BUILTIN = OURS.named("pools-builtin").having(
    speculative_draft_window_size=None, speculative_dflash_worker="builtin"
)

TARGET = TargetGeometry.from_pretrained(HYBRID_PAIR.target)
KV = sizes.target_kv_bytes(TARGET, 4)
# Of the draft's three layers.
DRAFT_KV = 3 * 2 * 2 * 64 * 4


def state_bytes() -> int:
    """Bytes of a recurrent state in float32."""
    shape = TARGET.recurrent
    assert shape is not None
    return shape.layers * 4 * (shape.state + shape.channels * shape.window)


def replay_bytes() -> int:
    """Replay's bytes for all requests and a row of padding."""
    assert TARGET.recurrent is not None
    each = sizes.replay_bytes(TARGET.recurrent, BLOCK, itemsize=4, gate_itemsize=4)
    return (REQUESTS + 1) * each


def pools(server: Server) -> tuple[int, int]:
    """States and tokens."""
    found = re.search(r"max_mamba_cache_size: (\d+), conv_state", server.log.read_text())
    assert found is not None
    return int(found[1]), server.info()["max_total_num_tokens"]


def of_ours(server: Server) -> int:
    """States of a server of ours, whose memory is full: bytes that are left hold no token."""
    (states, tokens), report = pools(server), server.dflash()
    running = carried_requests(REQUESTS, states)
    (group,) = report["draft_kv_groups"]
    assert group["is_ring"] and group["entries"] == (running + 1) * (WINDOW + BLOCK)
    charge = Charge.of([GroupKVSize(DRAFT_KV, group["entries"])], tokens)
    taken = replay_bytes() + (states + 1) * state_bytes() + report["draft_memory_bytes"]["total"]
    rest = FREE - taken - charge.total(tokens) - tokens * KV
    assert 0 <= rest < KV + charge.per_token
    said = [line for line in server.log.read_text().splitlines() if ": K/V of" in line]
    assert len(said) == 1 and f"{states} recurrent states carry {states // 5} (5 each)" in said[0]
    return states


@pytest.mark.long
@pytest.mark.server(OURS)
def test_states_are_what_sessions_need(server: Server) -> None:
    context = json.loads((HYBRID_PAIR.target / "config.json").read_text())
    demand = StateDemand.of(
        [GroupKVSize(DRAFT_KV, (REQUESTS + 1) * (WINDOW + BLOCK))],
        max_running=REQUESTS, state_bytes=state_bytes(), target_token_bytes=KV,
        context=context["max_position_embeddings"],
    )  # fmt: skip
    steps = server.dflash()["draft_memory_bytes"]["total"]
    states = of_ours(server)
    assert states == default_states(FREE - replay_bytes(), steps, demand)
    assert states < sglang_states(FREE - replay_bytes(), state_bytes())
    assert "--mamba-full-memory-ratio 0.9 gives that split" in server.log.read_text()


@pytest.mark.long
@pytest.mark.server(BY_RATIO)
def test_a_ratio_that_is_given_is_sglangs_split(server: Server) -> None:
    assert of_ours(server) == sglang_states(FREE - replay_bytes(), state_bytes())
    assert "gives that split" not in server.log.read_text()


@pytest.mark.long
@pytest.mark.server(GIVEN)
def test_states_that_are_given_are_kept(server: Server) -> None:
    assert of_ours(server) == 60
    assert "--max-running-requests 16: 12 run at a time" in server.log.read_text()


@pytest.mark.long
@pytest.mark.server(BUILTIN)
def test_sglangs_worker_fills_the_memory_as_inspect_counts(server: Server) -> None:
    states, tokens = pools(server)
    snapshot = BLOCK * state_bytes()
    assert states == sglang_states(FREE, state_bytes(), snapshot)
    scratch = (carried_requests(REQUESTS, states) + 1) * snapshot
    rest = FREE - (states + 1) * state_bytes() - scratch
    assert tokens == rest // (KV + DRAFT_KV)


@pytest.mark.long
@pytest.mark.server(PLAIN)
def test_a_plain_server_fills_the_memory_as_inspect_counts(server: Server) -> None:
    states, tokens = pools(server)
    assert states == sglang_states(FREE, state_bytes())
    assert tokens == (FREE - (states + 1) * state_bytes()) // KV
