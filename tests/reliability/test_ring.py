"""The rule of the ring in fixed examples. tests/drafting/test_kv_cache.py draws them at random."""

from __future__ import annotations

import torch

from tests.conftest import find
from tests.drafting.test_kv_cache import cache_of, read_by_request, stamped


def test_unused_entries_are_overwritten_oldest_first() -> None:
    cache = cache_of(6)
    cache.write(torch.tensor([0, 1, 2, 3]), stamped([1, 2, 3, 4]))
    read_by_request(cache, [20])  # Nothing is in use.
    cache.write(torch.tensor([4, 5]), stamped([5, 6]))
    assert min(read_by_request(cache, [0, 1, 2, 3, 4, 5])) >= 0
    read_by_request(cache, [20])
    cache.write(torch.tensor([6]), stamped([7]))
    assert [entry >= 0 for entry in read_by_request(cache, [0, 1, 2])] == [False, True, True]


def test_a_slot_is_dead_once_its_token_was_rejected() -> None:
    """Its last owner's entry is not found, nor the padding entry that rejected tokens go to."""
    cache, slots = cache_of(6), torch.tensor([7, 8, 9])
    cache.write(slots, stamped([1, 2, 3]))
    cache.write(slots, stamped([4, 5, 6]), torch.tensor([True, False, False]))
    entries = read_by_request(cache, [7, 8, 9])
    assert entries[1:] == [-1, -1] and cache.kv[entries[0]].unique().item() == 4
    assert find(cache, slots)[1].tolist() == [True, False, False]


def test_an_overwritten_entry_is_not_found_by_its_last_owner() -> None:
    cache = cache_of(3)
    cache.write(torch.tensor([0, 1, 2]), stamped([1, 2, 3]))
    cache.write(torch.tensor([3, 4]), stamped([4, 5]))
    entries = read_by_request(cache, [0, 1, 2, 3, 4])
    assert entries[:2] == [-1, -1] and min(entries[2:]) >= 0
