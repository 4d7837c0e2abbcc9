"""Real servers, one at a time: a configuration is started once and shared by the tests that ask for it."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from sglang_dflash.checkpoint.embedded import demo_pair
from tests.engine import workload
from tests.engine.nursery import ForkedServer, Nursery

PAIR = demo_pair("dense")
BASE = [
    "--model-path",
    str(PAIR.target),
    "--dtype",
    "float32",
    "--sleep-on-idle",
    "--max-total-tokens",
    "32768",
]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR.draft)]
# The same draft, said to be made for no more than 64 positions.
_FOLDER = tempfile.TemporaryDirectory()
SHORT_DRAFT = shutil.copytree(PAIR.draft, Path(_FOLDER.name) / "draft")
_config = json.loads((SHORT_DRAFT / "config.json").read_text())
(SHORT_DRAFT / "config.json").write_text(json.dumps({**_config, "max_position_embeddings": 64}))
# Both without weights.
CONFIG_ONLY = Path(_FOLDER.name) / "config-only"
shutil.copytree(PAIR.target.parent, CONFIG_ONLY, ignore=shutil.ignore_patterns("*.safetensors"))
WINDOW = ["--speculative-dflash-draft-window-size", "96", "--speculative-draft-sink-size", "4"]
FEW_SLOTS = ["--speculative-dflash-draft-kv-tokens", "150"]
CHAT_WINDOW = 512
CHATS = [
    *BASE,
    *DFLASH,
    "--speculative-draft-window-size",
    str(CHAT_WINDOW),
    "--max-running-requests",
    "8",
]
# A tenth of the default: 2 * 8 * (512 + 8) / 10.
TENTH = ["--speculative-dflash-draft-kv-tokens", "832"]
# As much of the memory as the server finds (see sized_server), so that its own sizing shows.
SIZED = [*BASE[:-2], "--mem-fraction-static", "0.2"]
# Written by the hybrid tests: random targets with recurrent layers, dense and with experts, and a draft for both.
HYBRID, HYBRID_MOE, HYBRID_DRAFT = (
    Path(_FOLDER.name) / name for name in ("hybrid", "hybrid-moe", "hybrid-draft")
)
# States are kept for the prefix cache every 64 tokens, so that many a verify step crosses such a boundary.
HYBRID_BASE = [
    "--dtype", "float32", "--sleep-on-idle", "--max-total-tokens", "16384", "--max-mamba-cache-size", "64",
    "--max-running-requests", "8", "--mamba-track-interval", "64", "--model-path",
]  # fmt: skip
HYBRID_DFLASH = [*DFLASH[:-1], str(HYBRID_DRAFT)]
TWO_RANKS = ["--tp-size", "2"]
NO_OVERLAP = ["--disable-overlap-schedule"]
# Every way that SGLang allows of keeping recurrent states for the prefix cache, overlapped or not.
CACHED = {
    "extra-buffer": ["--mamba-scheduler-strategy", "extra_buffer"],
    "extra-buffer-no-overlap": ["--mamba-scheduler-strategy", "extra_buffer", *NO_OVERLAP],
    "lazy": ["--mamba-radix-cache-strategy", "extra_buffer_lazy"],
    "no-buffer": ["--mamba-radix-cache-strategy", "no_buffer", *NO_OVERLAP],
}
ROLLBACKS = {
    kind: ["--speculative-dflash-recurrent-rollback", kind] for kind in ("replay", "snapshot")
}
# Written by the tests of request features. Everything that a request feature needs of the server, together.
ADAPTER = Path(_FOLDER.name) / "adapter"
FEATURES = [
    *BASE, "--max-running-requests", "8", "--enable-mixed-chunk", "--chunked-prefill-size", "128", "--enable-priority-scheduling",
    "--enable-custom-logit-processor", "--enable-return-hidden-states", "--enable-streaming-session",
    "--constrained-json-disable-any-whitespace", "--enable-lora", "--lora-paths", f"adapter={ADAPTER}",
]  # fmt: skip
CONFIGURATIONS = {
    "plain": BASE,
    "dflash": BASE + DFLASH,
    "page16-window": [
        *BASE,
        *DFLASH[:-1],
        str(SHORT_DRAFT),
        *WINDOW,
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "256",
    ],
    "page16-no-overlap": [
        *BASE,
        *DFLASH,
        "--page-size",
        "16",
        "--disable-overlap-schedule",
        "--chunked-prefill-size",
        "256",
    ],
    # A quarter of the KV, far too little draft KV, and SGLang's own test switch that retracts requests every 25 steps.
    "tight": [
        *BASE[:-1],
        "4000",
        *DFLASH,
        *WINDOW,
        *FEW_SLOTS,
        "--max-running-requests",
        "8",
        "--enable-metrics",
    ],
    "hybrid-plain": [*HYBRID_BASE, str(HYBRID)],
    "hybrid-plain-no-buffer": [*HYBRID_BASE, str(HYBRID), *CACHED["no-buffer"]],
    **{
        f"hybrid-{rollback}-{cached}": [
            *HYBRID_BASE,
            str(HYBRID),
            *HYBRID_DFLASH,
            *ROLLBACKS[rollback],
            *CACHED[cached],
        ]
        for rollback in ROLLBACKS
        for cached in CACHED
    },
    **{
        f"hybrid-{rollback}-tp2": [
            *HYBRID_BASE,
            str(HYBRID),
            *HYBRID_DFLASH,
            *ROLLBACKS[rollback],
            *TWO_RANKS,
        ]
        for rollback in ROLLBACKS
    },
    "hybrid-lazy-no-overlap": [
        *HYBRID_BASE,
        str(HYBRID),
        *HYBRID_DFLASH,
        *CACHED["lazy"],
        *NO_OVERLAP,
    ],
    "hybrid-broken": [*HYBRID_BASE, str(HYBRID), *HYBRID_DFLASH],
    "hybrid-moe-plain": [*HYBRID_BASE, str(HYBRID_MOE)],
    "hybrid-moe-auto": [*HYBRID_BASE, str(HYBRID_MOE), *HYBRID_DFLASH],
    "features-plain": [*FEATURES, *NO_OVERLAP],
    "features-dflash": [*FEATURES, *DFLASH],
    "features-dflash-no-overlap": [*FEATURES, *DFLASH, *NO_OVERLAP],
    "builtin": [*BASE, *DFLASH, "--speculative-dflash-worker", "builtin"],
    "tp2": [*BASE, *DFLASH, *TWO_RANKS],
    "builtin-tp2": [*BASE, *DFLASH, *TWO_RANKS, "--speculative-dflash-worker", "builtin"],
    "dp2": [*BASE, *DFLASH, "--dp-size", "2"],
    "simulated": [
        *BASE[:1],
        str(CONFIG_ONLY / "target"),
        *BASE[2:],
        *DFLASH[:-1],
        str(CONFIG_ONLY / "draft"),
        "--load-format",
        "dummy",
    ],
    "chats-default": CHATS,
    "chats-unbounded": [*CHATS, "--speculative-dflash-draft-kv-tokens", "100000"],
    "chats-tenth": [*CHATS, *TENTH],
    "chats-recompute": [*CHATS, "--speculative-dflash-recompute-tail", "512"],
    "lossy": [
        *SIZED,
        *DFLASH,
        "--speculative-draft-window-size",
        "512",
        "--max-running-requests",
        "16",
    ],
    "seeded-plain": [*SIZED, "--max-running-requests", "16", "--enable-deterministic-inference"],
    "seeded": [*BASE, *DFLASH, "--enable-deterministic-inference"],
}
HYBRIDS = [name for name in CONFIGURATIONS if name.startswith("hybrid-")]
MODULES = {
    "lossy": "tests.engine.lossy_server",
    "seeded-plain": "tests.engine.sized_server",
    **dict.fromkeys(HYBRIDS, "tests.engine.oracle_server"),
}


def shown_by(name: str) -> Path:
    """Where a hybrid configuration's server writes what it did (see oracle_server)."""
    folder = Path(_FOLDER.name) / f"shown-{name}"
    folder.mkdir(exist_ok=True)
    return folder


def oracle_of(name: str) -> Path:
    """The answers that a hybrid configuration's drafts are made of."""
    return Path(_FOLDER.name) / ("oracle-moe.json" if "moe" in name else "oracle.json")


def hybrid_environment(name: str) -> dict[str, str]:
    drafts = {} if "plain" in name else {"ORACLE": str(oracle_of(name))}
    return {
        "SHOWN": str(shown_by(name)),
        **drafts,
        **({"TOO_FEW": "1"} if "broken" in name else {}),
    }


ENVIRONMENT = {
    **{name: hybrid_environment(name) for name in HYBRIDS},
    # SGLang compiles what applies a penalty: half a minute of every server here, and nothing of what is tested.
    **{
        name: {"TORCHDYNAMO_DISABLE": "1"}
        for name in CONFIGURATIONS
        if name.startswith("features-")
    },
    "simulated": {
        "SGLANG_SIMULATE_ACC_LEN": "3.5",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    },
    "tight": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"},
}
# SGLang reads these environments when it is imported, and prometheus_client its folder: too late for a fork.
READ_ON_IMPORT = ("tight",)


class Running:
    """At most one server is alive per test process: a machine with two cores has room for two."""

    def __init__(self) -> None:
        self.name, self.server, self.nursery = "", None, Nursery()

    def get(self, name: str) -> Server:
        if self.name != name:
            self.stop()
            module = MODULES.get(name, "sglang.launch_server")
            make = (
                functools.partial(ForkedServer, self.nursery)
                if name not in READ_ON_IMPORT
                else Server
            )
            self.server = make(CONFIGURATIONS[name], env=ENVIRONMENT.get(name), module=module)
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
    one.nursery.close()


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
