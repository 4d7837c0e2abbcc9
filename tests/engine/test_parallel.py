"""Tensor and data parallelism over gloo: two ranks on one machine say what one says. Recurrent targets: test_7_hybrid.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_dflash.bench.server import Server
from sglang_dflash.checkpoint.embedded import demo_pair
from tests.engine import workload
from tests.engine.conftest import Running

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


def test_a_sharded_drafter_drafts_as_the_whole_one(answers: Any, running: Running) -> None:
    plain = {kind: answers("plain")[kind] for kind in KINDS}
    alone = {kind: answers("dflash")[kind] for kind in KINDS}
    server = running.get("tp2")
    got = ask(server)
    workload.assert_same_outputs(got, plain)
    report = server.dflash()
    assert report["tensor_parallel"] == 2
    # Every step of every request commits as much: the drafts are the same too, sums of two shards rounded otherwise.
    steps = [
        sum(answer["meta_info"]["spec_verify_ct"] for kind in KINDS for answer in every[kind])
        for every in (got, alone)
    ]
    assert abs(steps[0] - steps[1]) <= 0.01 * steps[1]


def test_a_draft_kv_cache_is_split_by_heads(running: Running) -> None:
    """Per rank half the bytes per entry: heads are sharded, entries are not."""
    report = running.get("tp2").dflash()
    whole = demo_config().kv_shape
    bytes_per_entry = report["draft_kv_bytes"] / (report["draft_kv_slots"] + 1)
    assert bytes_per_entry == whole[0] * whole[1] * whole[2] * whole[3] * 4 / 2


def demo_config() -> Any:
    from sglang_dflash.checkpoint.draft_config import DraftConfig

    return DraftConfig.from_pretrained(demo_pair("dense").draft)


def test_the_built_in_worker_runs_on_two_ranks_too(answers: Any, running: Running) -> None:
    """What we do not serve goes to it: the platform owes it the same."""
    workload.assert_same_outputs(
        ask(running.get("builtin-tp2"), ("demo",)), {"demo": answers("plain")["demo"]}
    )


def test_data_parallel_replicas_answer_alike(answers: Any, running: Running) -> None:
    server = running.get("dp2")
    workload.assert_same_outputs(ask(server), {kind: answers("plain")[kind] for kind in KINDS})
    states = [
        state["dflash"]
        for state in requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"]
    ]
    assert len(states) == 2 and all(
        state["verify_steps"] > 0 and state["acceptance_length"] > 1.5 for state in states
    )
