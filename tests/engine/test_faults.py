"""Faults under load: an exception in every step, SIGTERM, a killed scheduler (out of memory, say),
and a killed node of two. The whole server ends, and clients get an error.

    python -m pytest tests/engine/test_faults.py -m long -s

prints how long each takes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from sglang_dflash.tools.bench.server import Server, free_port
from tests.engine import workload
from tests.engine.servers import DFLASH, DP2, PLAIN, TP2, ServerConfig
from tests.engine.session import ServerSession

pytestmark = pytest.mark.long
# Nothing is to take longer than this, in seconds.
BOUND = 60


class Outcome(NamedTuple):
    """The way in which a request ended, the time, and its tokens."""

    how: str
    at: float
    tokens: list[int]


def send(server: Server, tokens: int, stream: bool = False) -> Outcome:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": "import os\n", "sampling_params": sampling, "stream": stream}
    found: list[int] = []
    try:
        answer = requests.post(f"{server.url}/generate", json=body, timeout=BOUND)
        how = str(answer.status_code)
        if answer.ok and not stream:
            found = answer.json()["output_ids"]
    except requests.RequestException as error:
        how = type(error).__name__
    return Outcome(how, time.monotonic(), found)


def get(server: Server, path: str) -> Outcome:
    try:
        how = str(requests.get(f"{server.url}/{path}", timeout=BOUND).status_code)
    except requests.RequestException as error:
        how = type(error).__name__
    return Outcome(how, time.monotonic(), [])


def report(what: str, began: float, server: Server, waiting: dict[str, Future[Outcome]]) -> Any:
    """Wait until the server has ended, print how long all took, and return its status and the
    outcomes."""
    while server.process.poll() is None and time.monotonic() < began + BOUND:
        time.sleep(0.05)
    status, after = server.process.poll(), time.monotonic() - began
    outcomes = {name: one.result() for name, one in waiting.items()}
    print(f"\n{what}: the server ended with status {status} after {after:.1f} s")
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.how} after {outcome.at - began:.1f} s")
    assert status is not None
    assert max(outcome.at for outcome in outcomes.values()) < began + BOUND
    return status, outcomes


def load(pool: ThreadPoolExecutor, server: Server, tokens: int) -> dict[str, Future[Outcome]]:
    return {f"client {i}": pool.submit(send, server, tokens) for i in range(4)}


@contextmanager
def started(
    servers: ServerSession, config: ServerConfig, **env: str
) -> Iterator[tuple[Server, ThreadPoolExecutor]]:
    """A server of the test's own that has answered once."""
    server = servers.own(config.with_env(**env))
    with server, ThreadPoolExecutor(4) as pool:
        assert send(server, 8).how == "200"
        yield server, pool


@pytest.mark.parametrize("phase", ["propose", "verify", "commit"])
def test_an_exception_in_every_step_ends_the_server(
    phase: str, servers: ServerSession, tmp_path: Path
) -> None:
    """Requests get HTTP 500, until a plain request fails, too. What watches the process has to
    start another. (Of one request or step: test_containment.py.)"""
    with started(servers, DFLASH.changed("faults"), FAULTS=str(tmp_path)) as (server, pool):
        waiting = load(pool, server, 20_000)
        time.sleep(1)
        (tmp_path / f"{phase}.always").touch()
        began = time.monotonic()
        first = {name: one.result() for name, one in waiting.items()}
        assert {outcome.how for outcome in first.values()} == {"500"}
        waiting = load(pool, server, 20_000)
        status, outcomes = report(phase, began, server, waiting)
    assert f"Fault: in {phase}" in server.log.read_text(errors="replace")
    assert status != 0 and all(outcome.how != "200" for outcome in outcomes.values())


@pytest.mark.parametrize("config", [DFLASH, DP2], ids=str)
def test_sigterm_lets_running_requests_end(config: ServerConfig, servers: ServerSession) -> None:
    """SGLang's graceful shutdown, also if all processes get the signal, as by systemd: running
    requests are answered, then the server ends."""
    with started(servers, config) as (server, pool):
        whole = send(server, 600).tokens
        waiting = load(pool, server, 600)
        time.sleep(0.5)
        parent = psutil.Process(server.process.pid)
        for process in (parent, *parent.children(recursive=True)):
            process.send_signal(signal.SIGTERM)
        _, outcomes = report("SIGTERM", time.monotonic(), server, waiting)
    assert [outcome.tokens for outcome in outcomes.values()] == [whole] * 4


def scheduler_of(server: Server, ranks: int = 1) -> psutil.Process:
    """The server's child that holds the model: of its children, the one with most memory. Of
    several ranks, the one that was started last."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    children.sort(key=lambda child: child.memory_info().rss)
    return max(children[-ranks:], key=lambda child: child.pid)


@pytest.mark.parametrize(("killed", "ranks"), [(DFLASH, 1), (TP2, 2)], ids=str)
def test_a_killed_scheduler_ends_the_server(
    killed: ServerConfig, ranks: int, servers: ServerSession
) -> None:
    with started(servers, killed) as (server, pool):
        waiting = {
            "/generate": pool.submit(send, server, 20_000),
            "/generate, streamed": pool.submit(send, server, 20_000, stream=True),
        }
        time.sleep(1)
        os.kill(scheduler_of(server, ranks).pid, signal.SIGKILL)
        began = time.monotonic()
        waiting |= {path: pool.submit(get, server, path) for path in ("health", "server_info")}
        status, outcomes = report(f"{killed}", began, server, waiting)
    # A shell shows 137.
    assert status == -signal.SIGKILL
    # A stream had begun with 200.
    assert all(o.how != "200" for name, o in outcomes.items() if "streamed" not in name)


@contextmanager
def two_nodes(servers: ServerSession) -> Iterator[list[Server]]:
    """`--nnodes 2 --tp-size 2` on the loopback (gloo); the first one answers."""
    config = TP2.having(nnodes=2, dist_init_addr=f"127.0.0.1:{free_port()}")
    nodes: list[Server] = [servers.own(config.having(node_rank=rank)) for rank in range(2)]
    try:
        for node in nodes:
            node.start()
        nodes[0].wait()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.recorded(PLAIN, workload.run)
def test_two_nodes_answer_as_one_and_end_together(servers: ServerSession, answers: Any) -> None:
    plain = workload.halved(answers(PLAIN, workload.run))["demo"]
    with two_nodes(servers) as (first, second), ThreadPoolExecutor(4) as pool:
        got = workload.some_short_and_demo(first)["demo"]
        workload.assert_same_outputs(got, plain)
        assert first.dflash()["tensor_parallel"] == 2
        assert workload.acceptance_length(got) > 2
        waiting = load(pool, first, 20_000)
        time.sleep(1)
        for child in psutil.Process(second.process.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)
        os.kill(second.process.pid, signal.SIGKILL)
        status, outcomes = report("a node killed", time.monotonic(), first, waiting)
    assert status != 0 and all(outcome.how != "200" for outcome in outcomes.values())
