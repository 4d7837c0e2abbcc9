"""Greedy outputs are plain decoding's in every configuration, and drafts are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from tests.engine import client, workload
from tests.engine.servers import (
    DFLASH,
    PAGE16_NO_OVERLAP,
    PAGE16_WINDOW,
    PLAIN,
    TIGHT,
    ServerConfig,
)


def test_there_are_at_least_sixty_prompts() -> None:
    assert sum(map(len, workload.prompts().values())) >= 60


@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.parametrize("config", [DFLASH, PAGE16_NO_OVERLAP, PAGE16_WINDOW], ids=str)
def test_outputs_are_those_of_plain_decoding(
    config: ServerConfig, answers: Any, server: Server
) -> None:
    plain, got = answers(PLAIN, workload.run), answers(config, workload.run)
    workload.assert_same_outputs(got, plain)
    assert server.dflash()["worker"] == "sglang_dflash.serving.step.worker.DFlashWorker"
    # A drafter that is never right would pass the comparison, too.
    assert workload.acceptance_length(got["demo"]) > 2
    # Pages of 16 round what is cached; the plain server has pages of 1.
    cached, expected = (
        [a["meta_info"]["cached_tokens"] for a in every["shared prefix"]] for every in (got, plain)
    )
    assert cached == expected or config.name.startswith("page16")
    assert sum(c > 200 for c in cached) == 12


@pytest.mark.server(DFLASH)
@pytest.mark.recorded(PLAIN, workload.run_penalised)
def test_penalised_requests_are_plain_decodings(answers: Any) -> None:
    ours, plain = (answers(config, workload.run_penalised) for config in (DFLASH, PLAIN))
    workload.assert_same_outputs({"penalised": ours}, {"penalised": plain})
    drafted = [a["meta_info"]["completion_tokens"] - a["meta_info"]["spec_verify_ct"] for a in ours]
    # Drafts do not know of penalties: fewer are accepted, but not none.
    assert all(n > 3 for n in drafted)


@pytest.mark.server(PAGE16_WINDOW)
def test_the_log_and_server_info_name_the_worker(server: Server) -> None:
    server.generate("import os\n", temperature=0, max_new_tokens=40, ignore_eos=True)
    report, log = server.dflash(), server.log.read_text()
    facts = {"block_size": 8, "window": 96, "sinks": 4, "draft_kv_entries": 2 * 48 * (96 + 4 + 8)}
    assert {k: report[k] for k in facts} == facts
    # 3 layers, K and V, 2 kv heads of 64, float32; and one row for writes that are not kept.
    assert report["draft_kv_bytes"] == (facts["draft_kv_entries"] + 1) * 3 * 2 * 2 * 64 * 4
    for field in (
        "'worker': 'sglang_dflash",
        "'block_size': 8",
        "'window': 96",
        "'sinks': 4",
        f"'draft_kv_bytes': {report['draft_kv_bytes']}",
    ):
        assert field in log
    needed = report["draft_memory_bytes"]
    assert needed["total"] == sum(n for part, n in needed.items() if part != "total")
    assert needed["logits"] and needed["slot_tables"] and needed["attention_workspace"]
    # Reserved before the pools are made.
    assert log.index("before the KV pools are sized: ") < log.index("KV Cache is allocated")
    by_position = report["acceptance_by_position"]
    assert by_position == sorted(by_position, reverse=True)


@pytest.mark.server(PAGE16_WINDOW)
def test_a_target_beyond_the_drafts_positions_is_served_with_one_warning(server: Server) -> None:
    """Outputs are compared above: the long prompts have ten times these positions, and no table is
    read past its end."""
    log = server.log.read_text().splitlines()
    warned = [line for line in log if "(max_position_embeddings)" in line]
    assert len(warned) == 1
    assert "contexts of 32768 tokens, the draft was made for 64" in warned[0]


@pytest.mark.server(PAGE16_WINDOW)
def test_a_flush_forgets_the_draft_kv(server: Server) -> None:
    server.generate("import os\n", temperature=0, max_new_tokens=8)
    assert server.dflash()["draft_kv_live_share"] > 0
    client.flush(server)
    assert server.dflash()["draft_kv_live_share"] == 0


@pytest.mark.server(TIGHT)
@pytest.mark.recorded(PLAIN, workload.run)
def test_repeatedly_retracted_requests(answers: Any, server: Server) -> None:
    got = answers(TIGHT, workload.run)
    workload.assert_same_outputs(got, answers(PLAIN, workload.run))
    assert sum(a["meta_info"]["num_retractions"] for kind in got.values() for a in kind) > 0
    assert server.dflash()["draft_kv_entries"] == 150
