"""Mixed traffic for a while, on a KV pool and a draft KV cache that are too small.

The ordinary run sends it for a quarter of a minute. For half an hour per pair:

    SGLANG_DFLASH_SOAK_MINUTES=30 python -m pytest tests/engine/test_soak.py -m long -s
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.engine import client
from tests.engine.hierarchical import SOAK_HOST, SOAK_HYBRID_HOST
from tests.engine.servers import (
    HYBRID_PAIR_PLAIN,
    PLAIN,
    SOAK,
    SOAK_HYBRID,
    SOAK_PLAIN,
    STRICT,
    TIGHT,
    Ask,
    ServerConfig,
)
from tests.engine.test_faults import scheduler_of
from tests.reliability.corpus import Expected, Plan, expected
from tests.reliability.traffic import Found, Traffic

MINUTES = "SGLANG_DFLASH_SOAK_MINUTES"
SECONDS = 16.0
SHORT = Plan("dense", prompts=16, longest_prompt=1200, longest_answer=80)
LONG = {
    "dense": Plan("dense", prompts=40, longest_prompt=4000, longest_answer=500),
    "hybrid": Plan("hybrid", prompts=24, longest_prompt=4000, longest_answer=400),
}
# What a run must have passed through.
RARE = (
    "poisoned entries",
    "end inside a block",
    "grammar end inside a block",
    "whole block accepted",
    "no draft accepted",
    "overwritten live entries",
    "overwritten entries in use",
)
# After a quarter of the run. Before that, caches fill.
MOST_GROWTH = 1.02


def short_answers(server: Server) -> list[Expected]:
    return expected(server, SHORT)


def long_answers(server: Server) -> list[Expected]:
    return expected(server, LONG["dense"])


def long_hybrid_answers(server: Server) -> list[Expected]:
    return expected(server, LONG["hybrid"])


def soak(server: Server, plain: list[Expected], clients: int, seconds: float) -> Found:
    """Run the traffic, and check what holds after it."""
    traffic = Traffic(server, plain, clients)
    at_rest = functools.partial(client.at_rest, server)
    found = traffic.run(seconds, max(8.0, seconds / 24), scheduler_of(server), at_rest)
    report = server.dflash()
    rare = report["rare_paths"]
    loaded = {key: of for key, of in report.items() if key.startswith("loaded_back")}
    run = {"rare_paths": rare, "seconds": seconds, "clients": clients}
    summary = {**found.summary(), **run, **loaded}
    print(f"\n{json.dumps(summary, indent=2)}")
    assert not found.wrong, found.wrong[:10]
    assert not found.failed, found.failed[:10]
    assert report["nonfinite_outputs"] == 0
    hybrid = report["recurrent_rollback"] is not None
    expected_paths = {*RARE, "crossed boundaries"} if hybrid else {*RARE}
    missed = [name for name in sorted(expected_paths) if not rare.get(name)]
    assert not missed and found.retractions > 0, missed
    assert report["acceptance_length"] > 1.2
    if is_hierarchical(server):
        assert all(of > 1000 for of in loaded.values()), loaded
    check_log(server)
    return found


def is_hierarchical(server: Server) -> bool:
    return "--enable-hierarchical-cache" in server.config.args()


def check_log(server: Server) -> None:
    """No text of a prompt and no value of the environment at the default level."""
    log = server.log.read_text(errors="replace")
    assert STRICT["SOAK_SECRET"] not in log
    assert "Mem Leak" not in log and "memory leak" not in log


@pytest.mark.server(TIGHT)
@pytest.mark.recorded(PLAIN, short_answers)
def test_a_while_of_mixed_traffic(answers: Any, server: Server) -> None:
    found = soak(server, answers(PLAIN, short_answers), clients=12, seconds=SECONDS)
    assert found.ties <= 0.01 * sum(found.requests.values())


@pytest.mark.server(TIGHT)
def test_a_prompt_is_not_logged(server: Server) -> None:
    """Nor what refuses one."""
    marker = "the-customers-secret"
    server.generate(marker, temperature=0, max_new_tokens=4)
    server.generate(f"{marker} = ", temperature=0, max_new_tokens=4, frequency_penalty=0.5)
    server.generate(f"{marker}(", temperature=0, max_new_tokens=4, regex="[a-z]{2,6}")
    assert marker not in server.log.read_text(errors="replace")
    check_log(server)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("config", "plain", "ask"),
    [
        pytest.param(config, plain, ask, marks=pytest.mark.recorded(plain, ask), id=config.name)
        for config, plain, ask in (
            (SOAK, SOAK_PLAIN, long_answers),
            (SOAK_HOST, SOAK_PLAIN, long_answers),
            (SOAK_HYBRID, HYBRID_PAIR_PLAIN, long_hybrid_answers),
            (SOAK_HYBRID_HOST, HYBRID_PAIR_PLAIN, long_hybrid_answers),
        )
    ],
)
def test_a_long_time_of_mixed_traffic(
    config: ServerConfig, plain: ServerConfig, ask: Ask, answers: Any, server: Server
) -> None:
    del config
    seconds = 60 * float(os.environ.get(MINUTES, "30"))
    found = soak(server, answers(plain, ask), clients=32, seconds=seconds)
    memory: Sequence[float] = found.rss
    if is_hierarchical(server):
        # Its host memory is resident once it was written: what is allocated must not grow.
        memory = [one["malloc_bytes"] for one in found.in_use]
    warm = memory[len(memory) // 4 :]
    assert warm[-1] <= MOST_GROWTH * warm[0], f"{warm[0]} to {warm[-1]} bytes"
