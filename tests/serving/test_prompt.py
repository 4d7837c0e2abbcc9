"""Which prompt tokens are projected, on a made-up batch."""

from __future__ import annotations

import torch

from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.facts.draft_config import Reach
from sglang_dflash.serving.step.prefill import PromptTokens

REACH = Reach(tokens=6, sinks=2)


def test_only_what_a_draft_can_see_is_projected() -> None:
    """Two requests of 12 and 5 tokens; of the first 3 are cached, its sinks among them."""
    tokens = PromptTokens.of([3, 0], [12, 5], [12, 5], REACH)
    assert tokens.rows.tolist() == [0] * 9 + [1] * 5
    assert tokens.positions[tokens.visible].tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4]
    # A chunk in the middle of a long prompt has left the window when drafting begins.
    assert not PromptTokens.of([4], [8], [40], REACH).visible.any()
    assert PromptTokens.of([4], [8], [40], Reach()).visible.all()


def test_if_not_all_fit_each_request_keeps_its_newest() -> None:
    tokens = PromptTokens.of([8, 0], [12, 3], [12, 3], REACH)
    cache = RingKVCache(60, 60, (1, 2, 1, 1), torch.float32, "cpu")
    order = cache.prompt_tokens_to_write(tokens.visible, tokens.age)
    rows, positions = tokens.rows[order].tolist(), tokens.positions[order].tolist()
    assert list(zip(rows, positions, strict=True)) == [
        (0, 8), (0, 9), (1, 0), (0, 10), (1, 1), (0, 11), (1, 2),
    ]  # fmt: skip
    hidden = PromptTokens.of([4], [8], [40], REACH)
    assert cache.prompt_tokens_to_write(hidden.visible, hidden.age).tolist() == []
