"""The soak's detectors see what they are for."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.serving.step.step import Step
from tests.conftest import write_kv
from tests.drafting.test_nonfinite import TOKENS, counts, drafter
from tests.reliability.corpus import Expected
from tests.reliability.watched import Observer, WatchedDrafter, count_overwrites, free_slots
from tests.serving.batches import batch_of, request_of


def allocator(*pages: int, page_size: int = 1) -> Any:
    return SimpleNamespace(
        get_all_free_pages=lambda: torch.tensor(pages, dtype=torch.int32), page_size=page_size
    )


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("freed", [None, 8])
def test_a_draft_that_reads_a_free_slot_is_counted(freed: int | None, window: int | None) -> None:
    watched: Any = drafter(window)
    watched.__class__ = WatchedDrafter
    slots = torch.arange(TOKENS, dtype=torch.int32)[None] + 1
    pages = [30, 31] if freed is None else [30, 31, freed]
    watched.runner = SimpleNamespace(token_to_kv_pool_allocator=allocator(*pages))
    watched.rare = Counter()
    hidden = torch.randn(TOKENS, watched.model.config.target_hidden_width)
    row, length = torch.zeros(1, dtype=torch.int64), torch.tensor([TOKENS])
    with torch.inference_mode():
        watched.absorb(hidden, torch.arange(TOKENS), slots[0].long())
        watched.propose(row, RequestSlots(slots, row, length, TOKENS))
    assert (counts(watched).nonfinite > 0) is (freed is not None)


def test_pages_are_made_of_slots() -> None:
    assert free_slots(allocator(2, 5, page_size=4)).tolist() == [8, 9, 10, 11, 20, 21, 22, 23]


def step_of(slots: Tensor) -> Step:
    rows = torch.arange(len(slots))
    return Step(rows, rows + 9, torch.zeros_like(slots), slots, [False] * len(slots))


def test_a_block_in_free_slots_is_an_error() -> None:
    runner = SimpleNamespace(token_to_kv_pool_allocator=allocator(4, 5))
    observer = Observer(runner, Counter())
    observer.before_step(None, step_of(torch.tensor([[1, 2, 3]])))
    with pytest.raises(RuntimeError, match="slots that are free"):
        observer.before_step(None, step_of(torch.tensor([[3, 4, 6]])))


def test_an_end_inside_a_block_is_counted_once() -> None:
    """Two requests end; one of them keeps all tokens of its last step."""
    rare: Counter[str] = Counter()
    observer = Observer(SimpleNamespace(token_to_kv_pool_allocator=allocator()), rare)
    requests = [
        request_of(str(i), 5, n, grammar=grammar, finished_reason=FINISH_LENGTH(n))
        for i, (n, grammar) in enumerate([(3, "a grammar"), (6, None)])
    ]
    batch, lengths = batch_of(*requests), torch.tensor([4, 1])
    accepted = Accepted(lengths, torch.zeros(2, 4), lengths)
    slots = torch.zeros(2, 4, dtype=torch.int64)
    for _ in range(4):
        # Ten committed tokens make six outputs, the newest of which is not committed yet.
        observer.after_step(batch, step_of(slots), accepted, torch.tensor([10, 10]))
    assert rare["end inside a block"] == rare["grammar end inside a block"] == 1
    assert rare["whole block accepted"] == rare["no draft accepted"] == 4


def test_overwritten_entries_are_counted() -> None:
    cache, rare = RingKVCache(4, 20, (1, 2, 1, 1), torch.float32, "cpu"), Counter[str]()
    count_overwrites(cache, rare)
    kv = torch.zeros(3, 1, 2, 1, 1)
    write_kv(cache, torch.tensor([1, 2, 3]), kv)
    write_kv(cache, torch.tensor([1, 2, 3]), kv)  # The same tokens' slots: nothing else is lost.
    assert rare["overwritten live entries"] == 0
    write_kv(cache, torch.tensor([4, 5, 6]), kv)
    assert rare["overwritten live entries"] == rare["overwritten entries in use"] == 2


def test_answers_are_compared_token_by_token() -> None:
    known = Expected([1], {}, [5, 6, 7], [0.0] * 3, [1.0, 1e-6, 1.0])
    assert known.differs_at([5, 6, 7], whole=True, asked=3) is None
    assert known.differs_at([5, 6], whole=False, asked=3) is None
    assert known.differs_at([5, 6], whole=True, asked=2) is None
    assert known.differs_at([5, 6], whole=True, asked=3) == 2
    assert known.differs_at([5, 6, 7], whole=True, asked=2) == 2
    assert known.differs_at([5, 9, 7], whole=True, asked=3) == 1
    assert known.is_tie(1) and not known.is_tie(2) and not known.is_tie(3)
