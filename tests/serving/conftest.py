"""Real servers, one at a time: a configuration is started once and shared by the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dflash.bench.demo_models import demo_pair
from sglang_dflash.bench.server import Server
from tests.serving import workload

PAIR = demo_pair("dense")
BASE = ["--model-path", str(PAIR.target), "--dtype", "float32", "--sleep-on-idle", "--max-total-tokens", "16384"]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR.draft)]
WINDOW = ["--speculative-dflash-draft-window-size", "96", "--speculative-draft-sink-size", "4"]
CONFIGURATIONS = {
    "plain": BASE,
    "dflash": BASE + DFLASH,
    "no-overlap": [*BASE, *DFLASH, "--disable-overlap-schedule", "--chunked-prefill-size", "256"],
    "page16-window": [*BASE, *DFLASH, *WINDOW, "--page-size", "16", "--chunked-prefill-size", "256"],
    "page16-no-overlap": [*BASE, *DFLASH, "--page-size", "16", "--disable-overlap-schedule"],
    # A quarter of the KV, far too little draft KV, and SGLang's own test switch that retracts requests every 25 steps.
    "tight": [*BASE[:-1], "4000", *DFLASH, *WINDOW, "--speculative-dflash-draft-kv-tokens", "150", "--max-running-requests", "8"],
    "builtin": [*BASE, *DFLASH, "--speculative-dflash-worker", "builtin"],
    "seeded-plain": [*BASE, "--enable-deterministic-inference"],
    "seeded": [*BASE, *DFLASH, "--enable-deterministic-inference"],
}
ENVIRONMENT = {"tight": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}}


class Running:
    """At most one server is alive: two would measure and disturb each other on a small machine."""

    def __init__(self) -> None:
        self.name, self.server = "", None

    def get(self, name: str) -> Server:
        if self.name != name:
            self.stop()
            self.server = Server(CONFIGURATIONS[name], env=ENVIRONMENT.get(name))
            self.server.__enter__()
            self.name = name
        assert self.server is not None
        return self.server

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.name, self.server = "", None


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    one = Running()
    yield one
    one.stop()


@pytest.fixture(scope="session")
def answers(running: Running) -> Any:
    """Configuration name -> its answers to the whole workload, asked for once."""
    known: dict[Any, Any] = {}

    def of(name: str, kind: str | None = None) -> Any:
        if name not in known:
            known[name] = workload.run(running.get(name))
            if name in ("plain", "dflash"):
                known[name, "penalised"] = {"penalised": workload.run_penalised(running.get(name))}
        return known[name] if kind is None else known[name, kind]

    return of
