"""Functions that send a test's requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench.server import Server

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}


def post(server: Server, path: str, body: dict[str, Any]) -> requests.Response:
    response = requests.post(f"{server.url}/{path}", json=body, timeout=120)
    assert response.ok, response.text
    return response


def ask(
    server: Server, text: str | list[str], more: dict[str, Any] | None = None, **sampling: Any
) -> Any:
    """The answer to one request, or a list of answers if it asks for several."""
    body = {"text": text, "sampling_params": {**GREEDY, **sampling}, **(more or {})}
    return post(server, "generate", body).json()


def counts(server: Server) -> VerifySteps:
    """Verify steps so far, by /server_info."""
    report = server.dflash()
    return VerifySteps(report["verify_steps"], report["committed_tokens"])


def stream(server: Server, body: dict[str, Any], begun: threading.Event) -> dict[str, Any]:
    """The last of the streamed answers; `begun` is set by the first."""
    last = {}
    with requests.post(
        f"{server.url}/generate", json={**body, "stream": True}, stream=True, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])
                begun.set()
    assert "output_ids" in last, last
    return last


def together(jobs: Iterable[Callable[[], Any]]) -> list[Any]:
    """Results of jobs that run at the same time, in their order."""
    jobs = list(jobs)
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: job(), jobs))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 30 s"
        time.sleep(0.01)


def at_rest(server: Server) -> None:
    """Wait until no request is left, and none holds a KV token outside the prefix cache; then empty
    that, too. An idle server ends if slots of its pools are lost."""
    held = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")

    def is_at_rest() -> bool:
        found = requests.get(f"{server.url}/v1/loads?include=all", timeout=30).json()["loads"]
        return not any(load[name] for load in found for name in held)

    until(is_at_rest)
    flush(server)


def flush(server: Server) -> None:
    """Empty the prefix cache. The server refuses while a request runs or holds memory."""
    until(lambda: requests.post(f"{server.url}/flush_cache", timeout=60).ok)
