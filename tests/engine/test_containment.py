"""An exception in a step costs the requests that caused it: they get HTTP 500, and all others the
answers that they get without it.

    SGLANG_DFLASH_FUZZ=20 python -m pytest tests/engine/test_containment.py -m long -s

is a soak, of some ten minutes for each server.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash.tools.bench.server import Server
from tests.conftest import FUZZ
from tests.engine import client, faults, workload
from tests.engine import feature_requests as features
from tests.engine.servers import (
    FAULTS,
    FEATURES_DFLASH,
    FEATURES_DFLASH_NO_OVERLAP,
    FEATURES_OVERLAPPED,
    FEATURES_PLAIN,
    HYBRID_PAIR_DFLASH,
    HYBRID_PAIR_PLAIN,
    PLAIN,
    TP2_DISAGREEING,
    Ask,
    ServerConfig,
    faulty,
)
from tests.engine.session import ServerSession

# What has a state that is restored, then the rest.
RESTORED: tuple[Ask, ...] = (
    features.grammars, features.logprobs, features.penalties, features.sessions,
    features.mixed_chunks,
)  # fmt: skip
OF_FEATURES: tuple[Ask, ...] = (*RESTORED, features.choices, features.limits, features.adapters)
# A server with faults, the one without that it is compared with, and what innocents ask.
COMPARED: dict[ServerConfig, tuple[ServerConfig, tuple[Ask, ...]]] = {
    faulty(FEATURES_DFLASH): (FEATURES_PLAIN, RESTORED if FUZZ == 1 else OF_FEATURES),
    faulty(FEATURES_OVERLAPPED): (FEATURES_PLAIN, OF_FEATURES),
    faulty(FEATURES_PLAIN): (FEATURES_PLAIN, OF_FEATURES),
    faulty(FEATURES_DFLASH_NO_OVERLAP): (FEATURES_PLAIN, OF_FEATURES),
    faulty(HYBRID_PAIR_PLAIN): (HYBRID_PAIR_PLAIN, (workload.some_short_and_demo,)),
    faulty(HYBRID_PAIR_DFLASH): (HYBRID_PAIR_PLAIN, (workload.some_short_and_demo,)),
    TP2_DISAGREEING: (PLAIN, (workload.some_short_and_demo,)),
}
USUAL = (faulty(FEATURES_DFLASH), TP2_DISAGREEING)


class Fire:
    """Guilty requests of every place, early and late ones, and faults of no request's making.

    Attributes:
        answers: how many got which status, by place.
    """

    def __init__(self, server: Server, folder: Path, places: tuple[str, ...], strays: bool) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self._server, self._folder, self._places = server, folder, places
        self._strays = strays
        self._over = threading.Event()

    def _send(self, seed: int) -> None:
        chance = random.Random(seed)
        for number in itertools.count():
            if self._over.is_set():
                return
            if self._strays and chance.random() < 0.1:
                (self._folder / chance.choice(self._places)).touch()
            # Of a merge, the guilty one cannot be told.
            place = chance.choice([place for place in self._places if place != "merge"])
            late = 0 if "prefill" in place else chance.choice((0, 0, 1, 9, 17))
            body = {
                "text": "import os\n" + "x" * chance.choice((1, 40)),
                "rid": f"guilty.{place}.{late}.{seed}.{number}",
                "sampling_params": {**client.GREEDY, "max_new_tokens": 64},
            }
            answer = requests.post(f"{self._server.url}/generate", json=body, timeout=120)
            self.answers[place, answer.status_code] += 1
            assert answer.ok or "The step that served this request failed: Fault" in answer.text
            time.sleep(chance.random() * 0.3)

    @contextmanager
    def on(self, clients: int = 2) -> Iterator[None]:
        with ThreadPoolExecutor(clients) as pool:
            sent = [pool.submit(self._send, seed) for seed in range(clients)]
            try:
                yield
            finally:
                self._over.set()
        for one in sent:
            one.result()


def answers_of(servers: ServerSession, plain: ServerConfig, asked: Ask) -> Any:
    if (plain, asked) != (PLAIN, workload.some_short_and_demo):
        return servers.answers(plain, asked)
    # Other tests have them recorded.
    every = workload.halved(servers.answers(PLAIN, workload.run))
    return {kind: every[kind] for kind in ("short", "demo")}


def states(server: Server) -> list[dict[str, Any]]:
    info = requests.get(f"{server.url}/server_info", timeout=30).json()
    return [state["containment"] for state in info["internal_states"]]


def same(asked: Ask, got: Any, expected: Any) -> None:
    workload.assert_same_outputs(got, expected)
    if asked is features.logprobs:
        for ours, plain in zip(got, expected, strict=True):
            for what in ("input", "output"):
                values = [
                    [value for value, *_ in of["meta_info"][f"{what}_token_logprobs"]]
                    for of in (ours, plain)
                ]
                first = 1 if what == "input" else 0  # SGLang leaves the prompt's first one open.
                assert values[0][first:] == pytest.approx(values[1][first:], abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=() if c in USUAL else pytest.mark.long) for c in COMPARED],
    ids=str,
)
def test_the_guilty_get_500_and_others_their_answers(
    config: ServerConfig, servers: ServerSession
) -> None:
    plain, asks = COMPARED[config]
    expected = {asked: answers_of(servers, plain, asked) for asked in asks}
    server = servers.server(config)
    canary = client.ask(server, "def canary():")["output_ids"]
    folder = servers.path(FAULTS)
    folder.mkdir(exist_ok=True)
    drafts = "--speculative-algorithm" in config.flags
    places = faults.DFLASH_PLACES if drafts else faults.PLAIN_PLACES
    # One of two ranks would find the file, and ranks that do not fail alike end.
    fire = Fire(server, folder, places, strays="--tp-size" not in config.flags)
    with fire.on():
        for asked in FUZZ * asks:
            same(asked, asked(server), expected[asked])
    for left in folder.iterdir():
        left.unlink()
    print(f"{config}: {states(server)}, {dict(fire.answers)}")
    assert {status for _, status in fire.answers} == {500}
    (state,) = states(server)
    assert state["on"] and state["ended_requests"] >= len(fire.answers)
    assert state["last_error"].startswith("Fault: ")
    assert client.ask(server, "def canary():")["output_ids"] == canary
    client.at_rest(server)
    log = server.log.read_text(errors="replace")
    # One per line of faults.py.
    assert 1 <= log.count("Traceback") <= 4 * int(server.config.flags.get("--tp-size", 1))


@pytest.mark.parametrize("place", ["prefill.0", "propose.9"])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "import os"}]}),
        ("completions", {"prompt": "import os"}),
    ],
)
def test_a_guilty_stream_ends_with_the_error(
    path: str, prompt: dict[str, Any], place: str, servers: ServerSession
) -> None:
    """Not with `finish_reason` "abort", which /v1/messages takes for the end of an answer."""
    server = servers.server(faulty(FEATURES_DFLASH))
    servers.path(FAULTS).mkdir(exist_ok=True)
    body = {**prompt, "model": "m", "rid": f"guilty.{place}", "stream": True, "max_tokens": 40}
    answer = requests.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    *_, last, done = (line for line in answer.text.splitlines() if line)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 500 and "failed: Fault" in error["message"]
    assert done == "data: [DONE]"


def test_the_server_ends_without_the_rows(servers: ServerSession) -> None:
    config = faulty(PLAIN, "no_containment")
    servers.path(FAULTS).mkdir(exist_ok=True)
    with servers.own(config) as server:
        with pytest.raises(requests.ConnectionError):
            body = {"text": "x", "rid": "guilty.prefill.0"}
            requests.post(f"{server.url}/generate", json=body, timeout=30)
        assert server.process.wait(timeout=30) != 0
