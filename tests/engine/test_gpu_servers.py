"""Whole servers on the GPU of this machine, in bfloat16: they answer as plain decoding there does.

    python -m pytest -m gpu tests/engine

Answers have to be equal, but for near-ties of bfloat16, which the plain server's log-probabilities
tell. To have a report when time is short: `timeout -s INT SECONDS python -m pytest ...`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine import checks, client
from tests.engine.comparison import Row, cases, compare
from tests.engine.near_ties import assert_same_but_for_near_ties, beside_likeliest
from tests.engine.servers import Ask, ServerConfig
from tests.engine.session import COMPILING_S, ServerSession
from tests.fake_gpu import asks
from tests.fake_gpu import servers as g

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # Plain decoding's server and its own may both compile kernels.
    pytest.mark.timeout(2 * COMPILING_S + 600),
]
PROMPTS, NEW_TOKENS = 16, 96


def on_this_gpu(config: ServerConfig, requests: int) -> ServerConfig:
    """The server of the faked GPU on this one, with pools and graphs for that many requests."""
    return g.on_this_gpu(config).having(
        dtype="bfloat16",
        max_total_tokens=65536,
        max_running_requests=requests,
        cuda_graph_max_bs_decode=requests,
        mem_fraction_static=0.2,
        context_length=None,
        sampling_backend=None,
    )


PLAIN, DFLASH, LOOKED_UP, BUILTIN = (
    on_this_gpu(config, 32) for config in (g.PLAIN, g.DFLASH, g.LOOKED_UP, g.BUILTIN)
)
HYBRID_PLAIN, HYBRID_REPLAY, HYBRID_SNAPSHOT = (
    on_this_gpu(config, 16).having(max_mamba_cache_size=96)
    for config in (g.HYBRID_PLAIN, g.HYBRID_REPLAY, g.HYBRID_SNAPSHOT)
)


def _demo_texts(server: Server, pair: str) -> dict[str, asks.Answers]:
    jobs = [
        lambda t=text: client.ask(server, t, max_new_tokens=NEW_TOKENS)
        for text in demo_pair(pair).prompts[:PROMPTS]
    ]
    return {"alone": asks.at_once(jobs, 1), "together": asks.at_once(jobs, 8)}


def demo_texts(server: Server) -> dict[str, asks.Answers]:
    """Texts of the dense pair, one and eight at a time."""
    return _demo_texts(server, "dense")


def hybrid_demo_texts(server: Server) -> dict[str, asks.Answers]:
    """Texts of the hybrid pair, one and eight at a time."""
    return _demo_texts(server, "hybrid")


SORTS, ABORTED = beside_likeliest(asks.every_sort), beside_likeliest(asks.aborted)
DENSE = (beside_likeliest(asks.greedy), SORTS, ABORTED, beside_likeliest(demo_texts))
HYBRID = (beside_likeliest(asks.hybrid), SORTS, ABORTED, beside_likeliest(hybrid_demo_texts))
GRAPHS = (checks.drafted, checks.proposals_from_graphs)
TABLE = tuple(
    row._replace(same=assert_same_but_for_near_ties)
    for row in (
        Row(DFLASH, PLAIN, DENSE, GRAPHS),
        Row(LOOKED_UP, PLAIN, DENSE, (checks.drafted,)),
        *(
            Row(config, HYBRID_PLAIN, HYBRID, (*GRAPHS, checks.rolls_back_by(how)))
            for how, config in (("replay", HYBRID_REPLAY), ("snapshot", HYBRID_SNAPSHOT))
        ),
    )
)
BUILTIN_ROW = Row(BUILTIN, PLAIN, DENSE[::3], same=assert_same_but_for_near_ties)


@pytest.mark.parametrize(("config", "row", "ask"), cases(TABLE))
def test_answers_are_plain_decodings(
    config: ServerConfig, row: Row, ask: Ask, answers: Any, server: Server, servers: ServerSession
) -> None:
    compare(row, ask, answers, server, servers)


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None,
    reason="SGLang's DFLASH worker does not start on CUDA without flashinfer",
)
@pytest.mark.parametrize(("config", "row", "ask"), cases([BUILTIN_ROW]))
def test_greedy_answers_of_sglangs_worker_are_plain_decodings(
    config: ServerConfig, row: Row, ask: Ask, answers: Any, server: Server, servers: ServerSession
) -> None:
    compare(row, ask, answers, server, servers)


@pytest.mark.parametrize("config", [DFLASH, LOOKED_UP, HYBRID_REPLAY, HYBRID_SNAPSHOT], ids=str)
def test_sampled_requests_are_answered(config: ServerConfig, server: Server) -> None:
    answers = asks.sampled(server)
    assert all(len(answer["output_ids"]) == asks.NEW_TOKENS for answer in answers)
