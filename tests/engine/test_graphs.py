"""Servers whose draft steps are replayed from recordings, as CUDA graphs are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import (
    DFLASH,
    GRAPHS,
    GRAPHS_WINDOW,
    HYBRID_PAIR,
    HYBRID_PAIR_GRAPHS,
    HYBRID_PAIR_PLAIN,
    PLAIN,
    ServerConfig,
)


@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.parametrize("config", [GRAPHS, GRAPHS_WINDOW], ids=str)
def test_outputs_are_plain_decodings(config: ServerConfig, answers: Any, server: Server) -> None:
    plain, got = answers(PLAIN, workload.run), answers(config, workload.run_half)
    workload.assert_same_outputs(got, workload.halved(plain))
    assert workload.acceptance_length(got["demo"]) > 2
    report = server.dflash()
    assert report["draft_graph_proposals"] > 50 and report["draft_graph_commits"] > 50
    # Batches of 7 and 8 are larger than the largest of GRAPHS.
    sizes = [1, 2, 6] if config == GRAPHS else list(range(1, 9))
    assert report["draft_graph_batch_sizes"] == sizes
    assert (report["draft_eager_proposals"] > 0) == (config == GRAPHS)


@pytest.mark.server(GRAPHS)
@pytest.mark.recorded(PLAIN, workload.run)
def test_aborts_between_replays_change_nothing(answers: Any, server: Server) -> None:
    """Clients hang up while others decode, and batches change their size."""
    texts = workload.prompts()["demo"][:8]

    def ask(at: int) -> dict[str, Any] | None:
        sampling = {"temperature": 0, "max_new_tokens": workload.NEW_TOKENS, "ignore_eos": True}
        if at % 2 == 0:
            return server.generate(texts[at], **sampling)
        body = {"text": texts[at], "sampling_params": {**sampling, "max_new_tokens": 4000}}
        with requests.post(
            f"{server.url}/generate", json={**body, "stream": True}, stream=True
        ) as r:
            next(r.iter_lines())
        return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(8)))
    expected = answers(PLAIN, workload.run)["demo"]
    for at in range(0, 8, 2):
        assert got[at]["output_ids"] == expected[at]["output_ids"]


def run_pair(server: Server) -> list[list[int]]:
    """Greedy answers of 150 tokens, which cross two boundaries of kept recurrent states."""
    with ThreadPoolExecutor(5) as pool:
        answers = pool.map(
            lambda text: server.generate(text, temperature=0, max_new_tokens=150, ignore_eos=True),
            HYBRID_PAIR.prompts[:10],
        )
        return [answer["output_ids"] for answer in answers]


@pytest.mark.server(HYBRID_PAIR_GRAPHS)
@pytest.mark.recorded(HYBRID_PAIR_PLAIN, run_pair)
def test_a_hybrid_pair_with_snapshots(answers: Any, server: Server) -> None:
    assert answers(HYBRID_PAIR_GRAPHS, run_pair) == answers(HYBRID_PAIR_PLAIN, run_pair)
    report = server.dflash()
    assert report["recurrent_rollback"] == "snapshot" and report["acceptance_length"] > 3
    assert report["draft_graph_proposals"] > 50 and report["draft_eager_proposals"] == 0


@pytest.mark.server(DFLASH)
def test_without_the_flag_nothing_is_recorded_on_a_cpu(server: Server) -> None:
    assert "draft_graph_batch_sizes" not in server.dflash()
