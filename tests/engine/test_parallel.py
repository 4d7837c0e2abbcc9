"""Tensor and data parallelism over gloo: two ranks on one machine answer as one does.

Recurrent targets on two ranks: test_hybrid.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dflash.bench.server import Server
from sglang_dflash.facts.draft_config import DraftConfig
from tests.engine import workload
from tests.engine.servers import BUILTIN_TP2, DFLASH, DP2, PAIR, PLAIN, TP2, TP2_DISAGREEING

KINDS = ("short", "demo")


def ask(server: Server, kinds: tuple[str, ...] = KINDS) -> dict[str, list[dict[str, Any]]]:
    """Eight at a time, like the workload of one rank."""
    texts = workload.prompts()

    def one(text: str) -> dict[str, Any]:
        return server.generate(
            text, temperature=0, max_new_tokens=workload.NEW_TOKENS, ignore_eos=True
        )

    with ThreadPoolExecutor(8) as pool:
        return {kind: list(pool.map(one, texts[kind])) for kind in kinds}


def of_kinds(answers: dict[str, Any], kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    return {kind: answers[kind] for kind in kinds}


def assert_same_drafts(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every step of every request commits as much: the drafts are the same too, up to the rounding
    of sums of two shards."""
    steps = [
        sum(answer["meta_info"]["spec_verify_ct"] for kind in got for answer in every[kind])
        for every in (got, expected)
    ]
    assert abs(steps[0] - steps[1]) <= 0.01 * steps[1]


@pytest.mark.server(TP2)
@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.recorded(DFLASH, workload.run)
def test_a_sharded_drafter_drafts_as_the_whole_one(answers: Any, server: Server) -> None:
    got = ask(server)
    workload.assert_same_outputs(got, of_kinds(answers(PLAIN, workload.run)))
    report = server.dflash()
    assert report["tensor_parallel"] == 2
    assert_same_drafts(got, answers(DFLASH, workload.run))


@pytest.mark.server(TP2)
def test_a_draft_kv_cache_is_split_by_heads(server: Server) -> None:
    """Per rank half the bytes per entry: heads are sharded, entries are not."""
    report = server.dflash()
    layers, two, heads, width = DraftConfig.from_pretrained(PAIR.draft).kv_shape
    bytes_per_entry = report["draft_kv_bytes"] / (report["draft_kv_entries"] + 1)
    assert bytes_per_entry == layers * two * heads * width * 4 / 2


@pytest.mark.server(TP2_DISAGREEING)
@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.recorded(DFLASH, workload.run)
def test_a_rank_that_disagrees_follows_the_first(answers: Any, server: Server) -> None:
    """A rank with other drafts or tokens would have other lengths than the first from then on."""
    got = ask(server, ("demo",))
    workload.assert_same_outputs(got, of_kinds(answers(PLAIN, workload.run), ("demo",)))
    assert_same_drafts(got, answers(DFLASH, workload.run))


@pytest.mark.server(BUILTIN_TP2)
@pytest.mark.recorded(PLAIN, workload.run)
def test_the_built_in_worker_runs_on_two_ranks_too(answers: Any, server: Server) -> None:
    """It serves what we do not: the platform must support it as well."""
    expected = of_kinds(answers(PLAIN, workload.run), ("demo",))
    workload.assert_same_outputs(ask(server, ("demo",)), expected)


@pytest.mark.server(DP2)
@pytest.mark.recorded(PLAIN, workload.run)
def test_data_parallel_replicas_answer_alike(answers: Any, server: Server) -> None:
    workload.assert_same_outputs(ask(server), of_kinds(answers(PLAIN, workload.run)))
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    states = [state["dflash"] for state in info["internal_states"]]
    assert len(states) == 2
    for state in states:
        assert state["verify_steps"] > 0 and state["acceptance_length"] > 1.5
