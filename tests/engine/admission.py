"""Requests for the last free place of a server, and for a place that only preemption frees."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sglang_dflash.tools.bench.server import Server
from tests.engine import workload
from tests.engine.client import GREEDY, ask, at_rest, post, stream, until

PROMPTS = workload.prompts()["demo"]
PLACES = 8
# Far more than are generated before the short answers end.
LONG = 3000


def admitted(server: Server) -> list[dict[str, Any]]:
    """A short answer beside 7 long ones, and an urgent one beside 8, for 8 places.

    No long answer has to end before a short one begins. Returns both short ones.
    """
    with ThreadPoolExecutor(PLACES) as pool:
        streams = [_begin(server, pool, i) for i in range(PLACES - 1)]
        short = ask(server, PROMPTS[8], max_new_tokens=8)
        assert not any(stream.done() for stream in streams)
        streams.append(_begin(server, pool, PLACES - 1))
        urgent = ask(server, PROMPTS[9], {"priority": 100}, max_new_tokens=8)
        assert not any(stream.done() for stream in streams)
        post(server, "abort_request", {"abort_all": True})
    at_rest(server)
    return [short, urgent]


def _begin(server: Server, pool: ThreadPoolExecutor, number: int) -> Future[dict[str, Any]]:
    """A long answer whose first tokens have come."""
    begun = threading.Event()
    sampling = {**GREEDY, "max_new_tokens": LONG}
    body = {"text": PROMPTS[number], "priority": 0, "sampling_params": sampling}
    answer = pool.submit(stream, server, body, begun)
    until(begun.is_set)
    return answer
