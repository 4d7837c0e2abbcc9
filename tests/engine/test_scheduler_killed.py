"""A scheduler, or one of two ranks, is killed (out of memory, say): the whole server ends, and
clients get an error.

    pytest tests/engine/test_scheduler_killed.py -s

prints how long each takes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import requests

from sglang_dflash.bench.server import Server
from tests.engine.nursery import ForkedServer
from tests.engine.servers import DFLASH, TP2, ServerConfig
from tests.engine.session import ServerSession

# Nothing is to take longer than this, in seconds.
BOUND = 30


def scheduler_of(server: Server, ranks: int = 1) -> psutil.Process:
    """The server's child that holds the model: of its children, the one with most memory. Of
    several ranks, the one that was started last."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    children.sort(key=lambda child: child.memory_info().rss)
    return max(children[-ranks:], key=lambda child: child.pid)


class Timed:
    """A request in a thread: how long after `began` it ended, and how."""

    def __init__(self, url: str, body: dict[str, Any] | None) -> None:
        self.ended, self.how = 0.0, ""
        self._url, self._body = url, body
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self._body is None:
                answer = requests.get(self._url, timeout=BOUND)
            else:
                answer = requests.post(self._url, json=self._body, timeout=BOUND)
            self.how = str(answer.status_code)
        except requests.RequestException as error:
            self.how = type(error).__name__
        self.ended = time.monotonic()


@pytest.mark.long
@pytest.mark.parametrize(("killed", "ranks"), [(DFLASH, 1), (TP2, 2)], ids=str)
def test_the_server_ends_and_clients_get_an_error(
    killed: ServerConfig, ranks: int, servers: ServerSession
) -> None:
    servers.stop()
    with ForkedServer(servers.nursery, servers.arguments(killed)) as server:
        server.generate("x = ", temperature=0, max_new_tokens=4)
        sampling = {"temperature": 0, "max_new_tokens": 20000, "ignore_eos": True}
        body = {"text": "x = ", "sampling_params": sampling}
        waiting = [
            Timed(f"{server.url}/generate", body),
            Timed(f"{server.url}/generate", {**body, "stream": True}),
        ]
        time.sleep(1)
        os.kill(scheduler_of(server, ranks).pid, signal.SIGKILL)
        began = time.monotonic()
        waiting += [Timed(f"{server.url}/{path}", None) for path in ("health", "server_info")]
        while server.process.poll() is None and time.monotonic() < began + BOUND:
            time.sleep(0.05)
        ended, status = time.monotonic(), server.process.poll()
        for request in waiting:
            request.thread.join()
    names = ("/generate", "/generate, streamed", "/health", "/server_info")
    print(f"\n{killed}")
    for name, request in zip(names, waiting, strict=True):
        print(f"{name}: {request.how} after {request.ended - began:.1f} s")
    print(f"the server ended with status {status} after {ended - began:.1f} s")
    # A shell shows 137.
    assert status == -signal.SIGKILL
    assert all(request.how != "200" for request in waiting[:1] + waiting[2:])
    assert max(request.ended for request in waiting) < began + BOUND
