"""The draft KV cache on real servers: chats that hit their prefix, a cache that is too small, lost
entries, and memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import requests

from experiments import conversations
from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import (
    CHAT_WINDOW,
    CHATS_DEFAULT,
    CHATS_RECOMPUTE,
    CHATS_TWENTIETH,
    CHATS_UNBOUNDED,
    DFLASH,
    LOSSY,
    PAIR,
    PLAIN,
    SEEDED_PLAIN,
    ServerConfig,
)

CONVERSATIONS = 14  # of which 8 run at a time


class Chatted(NamedTuple):
    """Answers to the chats, then to the branching prompts, and the worker's report after them."""

    chats: conversations.Answers
    branches: conversations.Answers
    report: dict[str, Any]


@functools.cache
def pieces() -> list[list[int]]:
    return conversations.texts(PAIR)


def chatted(server: Server) -> Chatted:
    return Chatted(
        conversations.chats(server, pieces(), conversations=CONVERSATIONS),
        conversations.branches(server, pieces()),
        server.dflash(),
    )


def branches_only(server: Server) -> conversations.Answers:
    return conversations.branches(server, pieces())


def kv_tokens(server: Server) -> int:
    """Tokens that the target's KV pool holds."""
    return requests.get(f"{server.url}/server_info", timeout=60).json()["max_total_num_tokens"]


@pytest.mark.recorded(PLAIN, chatted)
@pytest.mark.parametrize("config", [CHATS_DEFAULT, CHATS_TWENTIETH], ids=str)
def test_chats_are_plain_decodings_and_keep_their_prefix_cache(
    config: ServerConfig, answers: Any
) -> None:
    ours, plain = answers(config, chatted), answers(PLAIN, chatted)
    for got, expected in zip(ours[:2], plain[:2], strict=True):
        assert got.outputs == expected.outputs
        # One more is an answer's last token: the verify step has computed its KV, a plain step has
        # not.
        assert {a - b for a, b in zip(got.cached, expected.cached, strict=True)} <= {0, 1}
    assert sum(ours.chats.cached) > 10_000


@pytest.mark.server(CHATS_DEFAULT)
@pytest.mark.recorded(CHATS_UNBOUNDED, chatted)
def test_the_default_size_costs_no_acceptance(answers: Any) -> None:
    default, unbounded = answers(CHATS_DEFAULT, chatted), answers(CHATS_UNBOUNDED, chatted)
    assert unbounded.report["draft_kv_is_bounded"] is False
    assert unbounded.report["draft_kv_entries"] > 32768
    assert default.report["draft_kv_is_bounded"] is True
    assert default.report["draft_kv_entries"] == 2 * 8 * (CHAT_WINDOW + 8)
    assert unbounded.chats.outputs == default.chats.outputs
    assert default.chats.acceptance_length > 0.98 * unbounded.chats.acceptance_length


@pytest.mark.server(CHATS_TWENTIETH)
@pytest.mark.recorded(CHATS_DEFAULT, chatted)
@pytest.mark.recorded(CHATS_UNBOUNDED, chatted)
def test_too_small_a_cache_costs_acceptance_only(answers: Any) -> None:
    small, default = answers(CHATS_TWENTIETH, chatted), answers(CHATS_DEFAULT, chatted)
    unbounded = answers(CHATS_UNBOUNDED, chatted)
    assert small.report["draft_kv_entries"] * 20 <= default.report["draft_kv_entries"]
    assert small.chats.acceptance_length < 0.99 * unbounded.chats.acceptance_length


@pytest.mark.server(CHATS_RECOMPUTE)
@pytest.mark.recorded(CHATS_DEFAULT, chatted)
@pytest.mark.recorded(CHATS_UNBOUNDED, chatted)
def test_a_lost_tail_is_recomputed_on_request(answers: Any) -> None:
    """The branching prompts share tokens whose draft K/V was never computed. With them recomputed,
    the drafts are those of the unbounded cache."""
    default, unbounded = answers(CHATS_DEFAULT, chatted), answers(CHATS_UNBOUNDED, chatted)
    recomputed = answers(CHATS_RECOMPUTE, branches_only)
    assert recomputed.outputs == unbounded.branches.outputs
    assert recomputed.cached == unbounded.branches.cached
    assert recomputed.steps == unbounded.branches.steps != default.branches.steps


@pytest.mark.server(LOSSY)
@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.recorded(DFLASH, workload.run)
def test_losing_half_of_the_cache_every_step_changes_no_output(
    server: Server, answers: Any
) -> None:
    got = answers(LOSSY, workload.run_half)
    workload.assert_same_outputs(got, workload.halved(answers(PLAIN, workload.run)))
    assert server.dflash()["worker"] == "sglang_dflash.serving.step.worker.DFlashWorker"
    intact = workload.halved(answers(DFLASH, workload.run))
    assert workload.acceptance_length(got["demo"]) < workload.acceptance_length(intact["demo"])


@pytest.mark.server(LOSSY)
@pytest.mark.recorded(SEEDED_PLAIN, kv_tokens)
def test_a_bounded_cache_leaves_the_memory_to_the_target(server: Server, answers: Any) -> None:
    """16 requests, window 512: at least 95% of the KV tokens of a server without a draft."""
    ours, report = kv_tokens(server), server.dflash()
    assert report["draft_kv_entries"] == 2 * 16 * (512 + 8)
    # 6 layers, K and V, 2 kv heads of 64, float32.
    token_bytes = 6 * 2 * 2 * 64 * 4
    assert ours * token_bytes > 0.95 * (ours * token_bytes + report["draft_kv_bytes"])
    # One draft slot per target token would leave two thirds.
    assert 0.95 < ours / answers(SEEDED_PLAIN, kv_tokens) <= 1
