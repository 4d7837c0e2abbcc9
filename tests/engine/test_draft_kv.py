"""The draft KV cache on real servers: chats that hit their prefix, too small a cache, entries that vanish, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from benchmarks import conversations
from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.conftest import CHAT_WINDOW, PAIR, Running


@pytest.fixture(scope="module")
def chatted(running: Running) -> Any:
    """Configuration name -> its answers to the chats, then to the branching prompts, and the worker's report after them."""
    known: dict[str, Any] = {}
    pieces = conversations.texts(PAIR)

    def of(name: str) -> Any:
        if name not in known:
            server = running.get(name)
            # What another test left in the prefix cache would be found.
            assert requests.post(f"{server.url}/flush_cache", timeout=60).ok
            known[name] = (
                conversations.chats(server, pieces),
                conversations.branches(server, pieces),
                server.dflash(),
            )
        return known[name]

    return of


# "plain" first: the server that the tests before this file have left running is used before it is replaced.
@pytest.mark.parametrize("name", ["chats-default", "chats-tenth"])
def test_chats_are_plain_decodings_and_keep_their_prefix_cache(name: str, chatted: Any) -> None:
    for got, plain in zip(chatted(name)[:2], chatted("plain")[:2], strict=True):
        assert got.outputs == plain.outputs
        # One more is an answer's last token, whose KV the verify step has computed and a plain step has not.
        assert {a - b for a, b in zip(got.cached, plain.cached, strict=True)} <= {0, 1}
    assert sum(chatted(name)[0].cached) > 10_000


def test_the_default_size_costs_no_acceptance(chatted: Any) -> None:
    chats, _, report = chatted("chats-default")
    unbounded, _, all_of_it = chatted("chats-unbounded")
    assert all_of_it["draft_kv_is_bounded"] is False and all_of_it["draft_kv_slots"] > 32768
    assert report["draft_kv_is_bounded"] is True and report["draft_kv_slots"] == 2 * 8 * (
        CHAT_WINDOW + 8
    )
    assert unbounded.outputs == chats.outputs
    assert chats.acceptance_length > 0.98 * unbounded.acceptance_length


def test_too_small_a_cache_costs_acceptance_only(chatted: Any) -> None:
    small = chatted("chats-tenth")
    assert small[2]["draft_kv_slots"] * 10 <= chatted("chats-default")[2]["draft_kv_slots"]
    assert small[0].acceptance_length < 0.99 * chatted("chats-unbounded")[0].acceptance_length


def test_a_lost_tail_is_computed_again_on_request(chatted: Any, running: Running) -> None:
    """The branching prompts share tokens that were never projected; with them the drafts are those of the unbounded cache."""
    unbounded, default = chatted("chats-unbounded")[1], chatted("chats-default")[1]
    again = conversations.branches(running.get("chats-recompute"), conversations.texts(PAIR))
    assert again.outputs == unbounded.outputs and again.cached == unbounded.cached
    assert again.steps == unbounded.steps != default.steps


def test_losing_half_of_the_cache_every_step_changes_no_output(
    running: Running, answers: Any
) -> None:
    plain = answers("plain")
    got = answers("lossy")
    workload.assert_same_outputs(got, plain)
    report = running.get("lossy").dflash()
    assert report["worker"] == "sglang_dflash.serving.worker.DFlashWorker"
    assert workload.acceptance_length(got["demo"]) < workload.acceptance_length(
        answers("dflash")["demo"]
    )


def test_a_bounded_cache_leaves_the_memory_to_the_target(running: Running) -> None:
    """16 requests, window 512: at least 95% of the KV tokens of a server that has no draft at all, by the servers' own reports."""

    def kv_tokens(server: Server) -> int:
        return requests.get(f"{server.url}/server_info", timeout=60).json()["max_total_num_tokens"]

    ours, report = kv_tokens(running.get("lossy")), running.get("lossy").dflash()
    assert report["draft_kv_slots"] == 2 * 16 * (512 + 8)
    # 6 layers, K and V, 2 kv heads of 64, float32.
    token_bytes = 6 * 2 * 2 * 64 * 4
    assert ours * token_bytes > 0.95 * (ours * token_bytes + report["draft_kv_bytes"])
    # One draft slot per target token would leave two thirds.
    assert 0.95 < ours / kv_tokens(running.get("seeded-plain")) <= 1
