"""Greedy outputs are plain decoding's, to the token, in every configuration; and speculation really happens."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.engine import workload
from tests.engine.conftest import Running


@pytest.fixture(scope="session")
def plain(answers: Any) -> Any:
    return answers("plain")


def test_there_are_at_least_sixty_prompts() -> None:
    assert sum(map(len, workload.prompts().values())) >= 60


@pytest.mark.parametrize("name", ["dflash", "page16-no-overlap", "page16-window"])
def test_outputs_are_those_of_plain_decoding(
    name: str, plain: Any, answers: Any, running: Running
) -> None:
    got = answers(name)
    workload.assert_same_outputs(got, plain)
    report = running.get(name).dflash()
    assert report["worker"] == "sglang_dflash.serving.worker.DFlashWorker"
    # A drafter that is never right would pass the comparison, too.
    assert workload.acceptance_length(got["demo"]) > 2
    # Pages of 16 round what is cached; the plain server has pages of 1.
    cached = [a["meta_info"]["cached_tokens"] for a in got["shared prefix"]]
    assert cached == [
        a["meta_info"]["cached_tokens"] for a in plain["shared prefix"]
    ] or name.startswith("page16")
    assert sum(c > 200 for c in cached) == 12


def test_penalised_requests_are_plain_decodings(plain: Any, answers: Any) -> None:
    del plain
    ours, expected = answers("dflash", "penalised"), answers("plain", "penalised")
    workload.assert_same_outputs(ours, expected)
    committed = [
        a["meta_info"]["completion_tokens"] - a["meta_info"]["spec_verify_ct"]
        for a in ours["penalised"]
    ]
    # One token per step with penalties, more without.
    assert [c > 3 for c in committed] == [not workload.PENALTIES[i % 5] for i in range(10)]


def test_the_log_and_server_info_say_who_serves(running: Running) -> None:
    server = running.get("page16-window")
    report, log = server.dflash(), server.log.read_text()
    facts = {"block_size": 8, "window": 96, "sinks": 4, "draft_kv_slots": 2 * 48 * (96 + 4 + 8)}
    assert {k: report[k] for k in facts} == facts
    # 3 layers, K and V, 2 kv heads of 64, float32; and one row for what nobody keeps.
    assert report["draft_kv_bytes"] == (facts["draft_kv_slots"] + 1) * 3 * 2 * 2 * 64 * 4
    for field in (
        "'worker': 'sglang_dflash",
        "'block_size': 8",
        "'window': 96",
        "'sinks': 4",
        f"'draft_kv_bytes': {report['draft_kv_bytes']}",
    ):
        assert field in log
    assert report["acceptance_by_position"] == sorted(
        report["acceptance_by_position"], reverse=True
    )


def test_a_target_beyond_the_drafts_positions_is_served_and_said(running: Running) -> None:
    """The outputs are compared above: the long prompts have ten times these positions, and no table is run past."""
    told = [
        line
        for line in running.get("page16-window").log.read_text().splitlines()
        if "max_position_embeddings" in line
    ]
    assert len(told) == 1 and "contexts of 32768 tokens, the draft was made for 64" in told[0]


def test_a_flush_forgets_the_draft_kv(running: Running) -> None:
    server = running.get("page16-window")
    server.generate("import os\n", temperature=0, max_new_tokens=8)
    assert server.dflash()["draft_kv_live_share"] > 0
    assert requests.post(f"{server.url}/flush_cache", timeout=60).ok
    assert server.dflash()["draft_kv_live_share"] == 0


def test_requests_that_are_retracted_again_and_again(
    plain: Any, answers: Any, running: Running
) -> None:
    got = answers("tight")
    workload.assert_same_outputs(got, plain)
    assert sum(a["meta_info"]["num_retractions"] for kind in got.values() for a in kind) > 0
    assert running.get("tight").dflash()["draft_kv_slots"] == 150


def test_prometheus_series_are_the_workers_counts(running: Running) -> None:
    server = running.get("tight")
    server.generate("def f(", temperature=0, max_new_tokens=40, ignore_eos=True)
    report, series = server.dflash(), requests.get(f"{server.url}/metrics", timeout=60).text
    steps, tokens = (
        total(series, f"sglang_dflash_{name}_total")
        for name in ("verify_steps", "committed_tokens")
    )
    assert (
        steps == report["verify_steps"] > 5
        and round(tokens / steps, 4) == report["acceptance_length"]
    )
    for position, share in enumerate(report["acceptance_by_position"], 1):
        assert (
            round(
                total(series, "sglang_dflash_accepted_drafts_total", position=position) / steps, 4
            )
            == share
        )


def total(series: str, name: str, **labels: int) -> float:
    """Of the one sample with that name and those labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(series)
        for sample in family.samples
        if sample.name == name
        and all(sample.labels.get(label) == str(value) for label, value in labels.items())
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]
