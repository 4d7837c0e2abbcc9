"""`/update_weights_from_disk` with the right folder and with the draft's, on a server."""

from __future__ import annotations

import pytest
import requests

from sglang_dflash.bench.server import Server
from tests.engine import client, workload
from tests.engine.servers import DFLASH, PAIR
from tests.engine.session import ServerSession

OFF = DFLASH.named("guard-off").having(speculative_dflash_request_guard="off")


def update(server: Server, folder: str, **more: str) -> requests.Response:
    """Update an idle server: SGLang reports failure if its cache cannot be emptied afterwards."""
    client.flush(server)
    return requests.post(
        f"{server.url}/update_weights_from_disk", json={"model_path": folder, **more}, timeout=120
    )


def output(server: Server) -> list[int]:
    return client.ask(server, workload.prompts()["demo"][0])["output_ids"]


def test_outputs_are_wrong_without_the_row(servers: ServerSession) -> None:
    """With the guard off. The last update ruins the weights, so the server is the test's own."""
    with servers.own(OFF) as server:
        before = output(server)
        assert update(server, str(PAIR.target)).json()["success"]
        assert output(server) == before
        assert update(server, str(PAIR.draft)).json()["success"]
        assert output(server) != before


@pytest.mark.server(DFLASH)
def test_another_models_weights_are_refused(server: Server) -> None:
    """The weights stay, and at the end the same ones are loaded once more."""
    before = output(server)
    answer = update(server, str(PAIR.draft))
    assert answer.status_code == 400 and not answer.json()["success"]
    message = answer.json()["message"]
    assert "DFlash" in message and "Qwen3" in message and "unchanged" in message
    for name in (5000 * "a", "dra\0ft", "/no/such/folder"):
        answer = update(server, name)
        assert answer.status_code == 400 and not answer.json()["success"], name[:20]
    for load_format in ("nonesuch", "npcache", "pt"):
        answer = update(server, str(PAIR.target), load_format=load_format)
        assert answer.status_code == 400 and load_format in answer.json()["message"]
    client.flush(server)
    assert output(server) == before
    assert update(server, str(PAIR.target)).json()["success"]
    assert output(server) == before
