"""Which prompt tokens are projected, and which cached ones are recomputed, on a made-up batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.drafting.kv.direct import DirectKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.facts.draft_config import Reach
from sglang_dflash.serving.step.batch import recompute_cached_tail
from sglang_dflash.serving.step.prefill import PromptTokens, missing_tails

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


def batch_of(prefixes: list[int], lengths: list[int]) -> Any:
    reqs = [
        SimpleNamespace(
            origin_input_ids=list(range(n)), output_ids=[], get_fill_ids=lambda n=n: list(range(n))
        )
        for n in lengths
    ]
    return SimpleNamespace(
        reqs=reqs,
        prefix_lens=prefixes,
        extend_lens=[n - p for p, n in zip(prefixes, lengths, strict=True)],
        req_pool_indices=torch.arange(len(reqs)),
    )


def test_the_tail_begins_at_the_first_lost_token_and_is_bounded() -> None:
    table = torch.arange(60).view(3, 20)
    cache = RingKVCache(60, 60, (1, 2, 1, 1), torch.float32, "cpu")
    # 9 of 10 tokens are cached, 0, 1 and 4 to 8 visible. The first request has lost 6, the second
    # nothing, the third all.
    live = [*table[0, [0, 1, 4, 5, 7, 8]], *table[1, [0, 1, 4, 5, 6, 7, 8]]]
    cache.write(torch.stack(live), torch.zeros(len(live), 1, 2, 1, 1))
    batch = batch_of([9, 9, 9], [10, 10, 10])
    assert missing_tails(batch, table, cache, REACH, limit=5) == [3, 0, 5]
    assert missing_tails(batch, table, cache, REACH, limit=2) == [0, 0, 2]
    # If the limit reaches the sinks, the whole prefix is computed again.
    assert missing_tails(batch, table, cache, REACH, limit=50) == [3, 0, 9]
    assert missing_tails(batch_of([0, 0], [3, 4]), table, cache, REACH, limit=5) == [0, 0]


def test_a_direct_cache_has_lost_nothing() -> None:
    table = torch.arange(60).view(3, 20)
    cache = DirectKVCache(60, (1, 2, 1, 1), torch.float32, "cpu")
    assert missing_tails(batch_of([9, 9], [10, 10]), table, cache, REACH, limit=5) == [0, 0]


def test_a_cached_tail_is_recomputed_and_the_batch_put_back() -> None:
    batch = batch_of([4, 2], [6, 5])
    batch.input_ids, batch.out_cache_loc = (
        torch.tensor([4, 5, 2, 3, 4]),
        torch.tensor([14, 15, 22, 23, 24]),
    )
    batch.extend_num_tokens, batch.extend_logprob_start_lens = 5, [2, 3]
    before = dict(vars(batch))
    with recompute_cached_tail(batch, [3, 0]):
        assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 2, 3, 4]
        # The KV of recomputed tokens goes to the padding slot: the shared prefix does not change.
        assert batch.out_cache_loc.tolist() == [0, 0, 0, 14, 15, 22, 23, 24]
        assert (batch.prefix_lens, batch.extend_lens, batch.extend_num_tokens) == (
            [1, 2],
            [5, 3],
            8,
        )
        assert batch.extend_logprob_start_lens == [5, 3]
    assert vars(batch) == before
