"""Faults under load: an exception in a step, and SIGTERM.

    python -m pytest tests/engine/test_faults.py -m long -s

prints how long each takes. A killed scheduler: test_scheduler_killed.py.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash.bench.server import Server
from tests.engine.nursery import ForkedServer
from tests.engine.servers import DFLASH
from tests.engine.session import ServerSession
from tests.reliability.faulty import PHASES

# Nothing is to take longer than this, in seconds.
BOUND = 60
PROMPT = "import os\n"


def send(server: Server, tokens: int) -> tuple[str, float, list[int]]:
    """How a request ended, when, and its tokens."""
    body = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    found: list[int] = []
    try:
        answer = requests.post(f"{server.url}/generate", json=body, timeout=BOUND)
        how = str(answer.status_code)
        if answer.ok:
            found = answer.json()["output_ids"]
    except requests.RequestException as error:
        how = type(error).__name__
    return how, time.monotonic(), found


def ended(server: Server) -> tuple[int | None, float]:
    """The server's status and the time, once it has ended or `BOUND` is over."""
    deadline = time.monotonic() + BOUND
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return server.process.poll(), time.monotonic()


def load(server: Server, pool: ThreadPoolExecutor, tokens: int) -> list[Future[Any]]:
    return [pool.submit(send, server, tokens) for _ in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_a_step_ends_the_server(
    phase: str, servers: ServerSession, tmp_path: Path
) -> None:
    """As any exception in SGLang's scheduler does: no client gets a wrong answer. What watches the
    process has to start another."""
    servers.stop()
    trigger = tmp_path / "now"
    config = DFLASH.having(speculative_dflash_extension="tests.reliability.faulty:extension")
    env = {**config.env, "FAULT_IN": phase, "FAULT_AT": str(trigger)}
    with (
        ForkedServer(servers.nursery, servers.arguments(config), env=env) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        assert send(server, 8)[0] == "200"
        waiting = load(server, pool, 20_000)
        time.sleep(1)
        trigger.touch()
        began = time.monotonic()
        status, at = ended(server)
        answers = [one.result() for one in waiting]
    log = server.log.read_text(errors="replace")
    last = max(when for _, when, _ in answers)
    how = sorted({how for how, _, _ in answers})
    print(f"\n{phase}: clients got {how} after at most {last - began:.1f} s")
    print(f"the server ended with status {status} after {at - began:.1f} s")
    assert f"Fault: in {phase}" in log
    assert status not in (None, 0)
    assert all(how != "200" for how, _, _ in answers)


@pytest.mark.long
def test_sigterm_lets_running_requests_end(servers: ServerSession) -> None:
    """SGLang's graceful shutdown: running requests are answered, then the server ends."""
    servers.stop()
    with (
        ForkedServer(servers.nursery, servers.arguments(DFLASH)) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        whole = send(server, 600)[2]
        waiting = load(server, pool, 600)
        time.sleep(0.5)
        os.kill(server.process.pid, signal.SIGTERM)
        began = time.monotonic()
        status, at = ended(server)
        answers = [one.result() for one in waiting]
    last = max(when for _, when, _ in answers)
    print(f"\nSIGTERM: clients got {[how for how, _, _ in answers]} after {last - began:.1f} s")
    print(f"the server ended with status {status} after {at - began:.1f} s")
    assert [tokens for _, _, tokens in answers] == [whole] * 4
    assert status is not None
