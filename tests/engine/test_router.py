"""Two DFLASH servers behind SGLang's own router, one of them killed under load: no request is lost.

python -m pytest tests/engine/test_router.py -m long -s
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from sglang_dflash.tools.bench.server import Server
from tests.engine import workload
from tests.engine.client import until
from tests.engine.router import post, router
from tests.engine.servers import DFLASH
from tests.engine.session import ServerSession

CLIENTS, EACH = 4, 6


def generate(url: str, text: str) -> requests.Response:
    return post(url, text, temperature=0, max_new_tokens=100, ignore_eos=True)


def running_in(server: Server) -> int:
    loads = requests.get(f"{server.url}/v1/loads?include=all", timeout=30).json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


@pytest.mark.long
def test_a_killed_replica_loses_no_request(servers: ServerSession) -> None:
    texts = workload.prompts()["demo"][:CLIENTS]
    with (
        servers.own(DFLASH) as first,
        servers.own(DFLASH) as second,
        router("--policy", "round_robin", "--worker-urls", first.url, second.url) as url,
    ):
        expected = [generate(first.url, text).json()["output_ids"] for text in texts]

        def client(number: int) -> list[tuple[int, bool]]:
            found = []
            for _ in range(EACH):
                answer = generate(url, texts[number])
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
