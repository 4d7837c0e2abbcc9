"""Two nodes on the loopback (`--nnodes 2 --tp-size 2`, gloo): exact, and one of them killed.

python -m pytest tests/engine/test_two_nodes.py -m long -s
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from sglang_dflash.bench.server import Server, free_port
from tests.engine import workload
from tests.engine.nursery import ForkedServer
from tests.engine.servers import PLAIN, TP2
from tests.engine.session import ServerSession
from tests.engine.test_faults import BOUND, ended, send


def demo_answers(server: Server) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(4) as pool:
        return list(
            pool.map(
                lambda text: server.generate(
                    text, temperature=0, max_new_tokens=workload.NEW_TOKENS, ignore_eos=True
                ),
                workload.prompts()["demo"][:8],
            )
        )


@contextmanager
def two_nodes(servers: ServerSession) -> Iterator[list[Server]]:
    """Both nodes of a server; the first one answers."""
    servers.stop()
    config = TP2.having(nnodes=2, dist_init_addr=f"127.0.0.1:{free_port()}")
    nodes: list[Server] = [
        ForkedServer(
            servers.nursery, servers.arguments(config.having(node_rank=rank)), env=config.env
        )
        for rank in range(2)
    ]
    try:
        for node in nodes:
            node.start()
        nodes[0].wait()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.long
@pytest.mark.recorded(PLAIN, demo_answers)
def test_two_nodes_answer_as_one_and_end_together(servers: ServerSession, answers: Any) -> None:
    plain = answers(PLAIN, demo_answers)
    with two_nodes(servers) as (first, second), ThreadPoolExecutor(2) as pool:
        got = demo_answers(first)
        workload.assert_same_outputs({"demo": got}, {"demo": plain})
        assert first.dflash()["tensor_parallel"] == 2
        assert workload.acceptance_length(got) > 2
        waiting = [pool.submit(send, first, 20_000) for _ in range(2)]
        time.sleep(1)
        for child in psutil.Process(second.process.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)
        os.kill(second.process.pid, signal.SIGKILL)
        began = time.monotonic()
        status, at = ended(first)
        ends = [one.result() for one in waiting]
    how, last = sorted({how for how, _, _ in ends}), max(when for _, when, _ in ends)
    print(f"\na node killed: clients got {how} after at most {last - began:.1f} s")
    print(f"the other node ended with status {status} after {at - began:.1f} s")
    assert status not in (None, 0)
    assert "200" not in how and last - began < BOUND
