"""The dashboard for Grafana, asked of a Prometheus that scrapes a server under load."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash.tools.bench.server import Server, free_port
from tests.dashboard import QUERIES, filled_in
from tests.engine import workload
from tests.engine.client import ask
from tests.engine.servers import PAGE16_WINDOW

PROMETHEUS = shutil.which("prometheus")
CLIENTS = 2
# Between scrapes, and what rates are of.
SCRAPE_S, RATE_S = 1, 15


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """The URL of one that scrapes the server."""
    port = free_port()
    job = {
        "job_name": "sglang",
        "scrape_interval": f"{SCRAPE_S}s",
        "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
    process = subprocess.Popen(
        [
            str(PROMETHEUS), f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=(folder / "prometheus.log").open("w"),
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Requests one after another, of some clients."""
    texts, ended = workload.prompts()["demo"], threading.Event()

    def client(number: int) -> None:
        while not ended.is_set():
            ask(server, texts[number], max_new_tokens=64)

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            ended.set()
        for one in running:
            one.result()


def answer(url: str, query: str) -> list[dict[str, Any]]:
    got = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=30)
    assert got.ok, got.text
    return list(got.json()["data"]["result"])


@pytest.mark.long
@pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus (Debian's package)")
@pytest.mark.server(PAGE16_WINDOW)
def test_every_panel_has_data(server: Server, tmp_path: Path) -> None:
    asked = {at: filled_in(query, f"{RATE_S}s") for at, query in QUERIES.items()}
    with prometheus(server, tmp_path) as url, load(server):
        time.sleep(2 * RATE_S)
        found = {at: answer(url, query) for at, query in asked.items()}
        # A name that does not exist: without data, this test would not notice a renamed series.
        renamed = asked["Acceptance length", "A"].replace("verify_steps", "verified_steps")
        assert answer(url, renamed) == []
    values = {at: [float(one["value"][1]) for one in got] for at, got in found.items()}
    print("".join(f"\n{title}, {letter}: {of}" for (title, letter), of in values.items()))
    assert [at for at, of in values.items() if not of or not all(map(math.isfinite, of))] == []
    positions = found["Drafts accepted, by position", "A"]
    assert {one["metric"]["position"] for one in positions} == {*"1234567"}
    (length,) = values["Acceptance length", "A"]
    assert 1 <= length <= 8 and length == pytest.approx(1 + sum(
        values["Drafts accepted, by position", "A"]
    ), rel=0.05)  # fmt: skip
    assert sum(values["Verify width", "A"]) == pytest.approx(1, rel=0.01)
    assert values["Failures", "A"] == values["Failures", "B"] == [0]
