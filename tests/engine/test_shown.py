"""The log and /server_info of a server."""

from __future__ import annotations

import time

import psutil
import pytest

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.tools.bench.server import Server
from tests.engine import client
from tests.engine.servers import DFLASH, PAGE16_WINDOW, PAIR, TP2_DISAGREEING


@pytest.mark.server(PAGE16_WINDOW)
def test_the_log_and_server_info_name_the_worker(server: Server) -> None:
    server.generate("import os\n", temperature=0, max_new_tokens=40, ignore_eos=True)
    report, log = server.dflash(), server.log.read_text()
    facts = {"block_size": 8, "window": 96, "sinks": 4, "draft_kv_entries": (48 + 1) * (96 + 4 + 8)}
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
    assert needed["logits"] and needed["context_tables"] and needed["attention_workspace"]
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


@pytest.mark.server(TP2_DISAGREEING)
def test_a_draft_kv_cache_is_split_by_heads(server: Server) -> None:
    """Per rank half the bytes per entry: heads are sharded, entries are not."""
    report = server.dflash()
    layers, two, heads, width = DraftConfig.from_pretrained(PAIR.draft).kv_shape
    bytes_per_entry = report["draft_kv_bytes"] / (report["draft_kv_entries"] + 1)
    assert bytes_per_entry == layers * two * heads * width * 4 / 2


@pytest.mark.server(DFLASH)
def test_a_server_without_requests_sleeps(server: Server) -> None:
    """Its scheduler took a core."""

    def cpu_seconds() -> float:
        server_process = psutil.Process(server.process.pid)
        every = [server_process, *server_process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in every)

    server.generate("import os\n", temperature=0, max_new_tokens=4)
    time.sleep(1)
    before = cpu_seconds()
    time.sleep(4)
    spent = cpu_seconds() - before
    print(f"{spent:.2f} CPU seconds in 4 s without requests")
    assert spent < 0.5


@pytest.mark.server(DFLASH)
def test_it_tells_where_the_time_of_a_step_goes(server: Server) -> None:
    answer = server.generate("import os\n", temperature=0, max_new_tokens=64, ignore_eos=True)
    report = server.dflash()
    shares, spent = report["step_shares"], report["host_seconds"]
    assert sum(shares.values()) == pytest.approx(1, abs=0.001) and min(shares.values()) > 0
    # In a forward of the target, and one of the drafter.
    assert shares["verify"] > shares["commit"] and shares["propose"] > shares["commit"]
    step = report["step_milliseconds"] / 1000
    parts = sum(spent[part] for part in ("verify", "propose", "commit"))
    assert parts / report["decode_steps"] < step < answer["meta_info"]["e2e_latency"]


@pytest.mark.server(DFLASH)
def test_without_the_flag_nothing_is_recorded_on_a_cpu(server: Server) -> None:
    assert "draft_graph_batch_sizes" not in server.dflash()
