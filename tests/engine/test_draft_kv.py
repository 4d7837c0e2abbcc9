"""Cost of the draft KV cache's size on real servers: acceptance, and the target's memory.
(Not its outputs: test_exactness.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import requests

from sglang_dflash.tools.bench.server import Server
from tests.engine.servers import (
    BOUNDED,
    CHAT_WINDOW,
    CHATS_DEFAULT,
    CHATS_UNBOUNDED,
    DFLASH_FLAGS,
    SEEDED_PLAIN,
    SIZED,
    SLIDING_DRAFT,
)
from tests.engine.workload import acceptance_length, assert_same_outputs, chatted

SLIDING = SIZED.named("sliding-draft").having(**DFLASH_FLAGS | SLIDING_DRAFT)


def report(server: Server) -> dict[str, Any]:
    return server.dflash()


def is_ring(shown: dict[str, Any]) -> bool:
    return all(group["is_ring"] for group in shown["draft_kv_groups"])


def kv_tokens(server: Server) -> int:
    """Tokens that the target's KV pool holds."""
    return requests.get(f"{server.url}/server_info", timeout=60).json()["max_total_num_tokens"]


@pytest.mark.long
@pytest.mark.server(CHATS_DEFAULT)
@pytest.mark.recorded(CHATS_UNBOUNDED, chatted, report)
def test_the_default_size_costs_no_acceptance(answers: Any, server: Server) -> None:
    default, unbounded = (answers(c, chatted)["chats"] for c in (CHATS_DEFAULT, CHATS_UNBOUNDED))
    shown = answers(CHATS_UNBOUNDED, report)
    assert not is_ring(shown) and shown["draft_kv_entries"] > 32768
    assert is_ring(server.dflash())
    assert server.dflash()["draft_kv_entries"] == (8 + 1) * (CHAT_WINDOW + 8)
    assert_same_outputs(default, unbounded)
    assert acceptance_length(default) > 0.98 * acceptance_length(unbounded)


@pytest.mark.long
@pytest.mark.server(SLIDING)
@pytest.mark.recorded(SEEDED_PLAIN, kv_tokens)
def test_sliding_layers_leave_the_memory_to_the_target(server: Server, answers: Any) -> None:
    """No flag is needed. One draft slot per target token would leave 6 of 9 layers' worth."""
    (group,) = server.dflash()["draft_kv_groups"]
    assert (group["layers"], group["window"]) == ([0, 1, 2], 256)
    assert group["is_ring"] and group["entries"] == (16 + 1) * (256 + 8)
    assert 0.97 < kv_tokens(server) / answers(SEEDED_PLAIN, kv_tokens) <= 1


@pytest.mark.server(BOUNDED)
@pytest.mark.recorded(SEEDED_PLAIN, kv_tokens)
def test_a_bounded_cache_leaves_the_memory_to_the_target(server: Server, answers: Any) -> None:
    """16 requests, window 512: at least 95% of the KV tokens of a server without a draft."""
    ours, report = kv_tokens(server), server.dflash()
    assert report["draft_kv_entries"] == (16 + 1) * (512 + 8)
    # 6 layers, K and V, 2 kv heads of 64, float32.
    token_bytes = 6 * 2 * 2 * 64 * 4
    assert ours * token_bytes > 0.95 * (ours * token_bytes + report["draft_kv_bytes"])
    # One draft slot per target token would leave two thirds.
    assert 0.95 < ours / answers(SEEDED_PLAIN, kv_tokens) <= 1
