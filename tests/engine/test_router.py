"""Two DFLASH servers behind SGLang's own router, one of them killed under load: no request is lost.

python -m pytest tests/engine/test_router.py -m long -s
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests

from sglang_dflash.bench.server import Server, free_port
from tests.engine import workload
from tests.engine.client import until
from tests.engine.nursery import ForkedServer
from tests.engine.servers import DFLASH
from tests.engine.session import ServerSession

BOUND = 120
CLIENTS, EACH = 4, 6


@contextmanager
def router(servers: list[Server]) -> Iterator[str]:
    """The router's address, once it answers."""
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--policy", "round_robin", "--prometheus-port", str(free_port()),
        "--worker-urls", *(server.url for server in servers),
    ]  # fmt: skip
    log = Path(tempfile.mkstemp(prefix="sglang-router-", suffix=".log")[1])
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + BOUND
    try:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(requests.RequestException):
                if generate(url, "x = ", 2).ok:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-2000:])
        yield url
    finally:
        process.terminate()
        process.wait(30)


def generate(url: str, text: str, tokens: int) -> requests.Response:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": text, "sampling_params": sampling}
    return requests.post(f"{url}/generate", json=body, timeout=BOUND)


def running_in(server: Server) -> int:
    loads = requests.get(f"{server.url}/v1/loads?include=all", timeout=30).json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


@pytest.mark.long
def test_a_killed_replica_loses_no_request(servers: ServerSession) -> None:
    servers.stop()
    texts = workload.prompts()["demo"][:CLIENTS]
    with (
        ForkedServer(servers.nursery, servers.arguments(DFLASH)) as first,
        ForkedServer(servers.nursery, servers.arguments(DFLASH)) as second,
        router([first, second]) as url,
    ):
        expected = [generate(first.url, text, 100).json()["output_ids"] for text in texts]

        def client(number: int) -> list[tuple[int, bool]]:
            found = []
            for _ in range(EACH):
                answer = generate(url, texts[number], 100)
                same = answer.ok and answer.json()["output_ids"] == expected[number]
                found.append((answer.status_code, same))
            return found

        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(client, number) for number in range(CLIENTS)]
            time.sleep(1)
            until(lambda: running_in(second) > 0)
            second.stop()
            began = time.monotonic()
            results = [result for one in running for result in one.result()]
        took = time.monotonic() - began
    print(f"\n{Counter(results)}: (status, same answer); {took:.1f} s after one was killed")
    assert set(results) == {(200, True)} and len(results) == CLIENTS * EACH
