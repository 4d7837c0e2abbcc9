"""DraftKVCache against a plain model of it: a dictionary, and a list that says which entries were overwritten."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.core.kv_cache import DraftKVCache, IdentityDraftKVCache

TARGET_SLOTS = 24
SHAPE = (1, 2, 1, 1)


def cache_of(num_slots: int) -> DraftKVCache:
    cache = DraftKVCache(num_slots, SHAPE, torch.float32, "cpu")
    cache.attach(TARGET_SLOTS)
    return cache


def stamped(values: list[int]) -> torch.Tensor:
    """K/V entries that carry a number, so that a stranger's entry is told from one's own."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None, None].expand(-1, *SHAPE)


slots = st.lists(st.integers(0, TARGET_SLOTS - 1), min_size=1, max_size=12, unique=True)
write = st.tuples(st.just("write"), slots, st.lists(st.booleans(), min_size=12, max_size=12))
forget = st.tuples(st.just("forget"), slots, st.none())
clear = st.tuples(st.just("clear"), st.none(), st.none())


@settings(max_examples=300, deadline=None)
@given(num_slots=st.integers(1, 16), operations=st.lists(st.one_of(write, write, write, forget, clear), max_size=20))
def test_behaves_as_a_ring_keyed_by_target_slot(num_slots: int, operations: list) -> None:
    """Recycled target slots, overwritten entries, rejected tokens and more live tokens than the ring holds."""
    cache = cache_of(num_slots)
    ring: list[tuple[int, int]] = []  # (target slot, number), oldest first
    number = 0
    for kind, targets, keep in operations:
        if kind == "clear":
            cache.clear()
            ring = []
        elif kind == "forget":
            cache.forget(torch.tensor(targets))
            ring = [(-1, n) if t in targets else (t, n) for t, n in ring]
        else:
            numbers = list(range(number, number + len(targets)))
            number += len(targets)
            kept = keep[: len(targets)]
            cache.write(torch.tensor(targets), stamped(numbers), torch.tensor(kept))
            ring = [(-1, n) if t in targets else (t, n) for t, n in ring]
            ring += [(t, n) for t, n, k in zip(targets, numbers, kept, strict=True) if k]
            ring = ring[-num_slots:]
        expected = {t: n for t, n in ring if t >= 0}
        found, live = cache.gather(torch.arange(TARGET_SLOTS)[None], room=1)
        assert {t for t in range(TARGET_SLOTS) if live[0, t]} == set(expected)
        for target, stamp in expected.items():
            assert found[0, target].flatten().tolist() == [stamp, stamp]
        assert abs(cache.live_share() - len(expected) / num_slots) < 1e-6


def test_a_stranger_in_a_recycled_slot_is_never_read() -> None:
    """A target slot freed by one request and taken over by another's unprojected token must come back dead."""
    cache = cache_of(8)
    cache.write(torch.tensor([3]), stamped([7]))
    cache.forget(torch.tensor([3]))
    assert not cache.find(torch.tensor([3]))[1].item()


def test_of_one_write_larger_than_the_ring_the_last_tokens_stay() -> None:
    cache = cache_of(4)
    cache.write(torch.arange(10), stamped(list(range(10))))
    assert cache.find(torch.arange(10))[1].tolist() == [False] * 6 + [True] * 4


def test_gather_leaves_room_that_is_safe_to_write() -> None:
    """The free rows are a copy: filling them must change no entry."""
    cache = cache_of(4)
    cache.write(torch.tensor([5, 6]), stamped([1, 2]))
    kv, live = cache.gather(torch.tensor([[5, 6]]), room=3)
    kv[:, -3:] = 99
    again, _ = cache.gather(torch.tensor([[5, 6]]), room=0)
    assert live.all() and again.flatten().tolist() == [1, 1, 2, 2]


def test_identity_map_keeps_everything_but_rejected_tokens() -> None:
    cache = IdentityDraftKVCache(TARGET_SLOTS, SHAPE, torch.float32, "cpu")
    cache.entries.zero_()
    cache.write(torch.tensor([4, 5, 6]), stamped([1, 2, 3]), torch.tensor([True, False, True]))
    kv, live = cache.gather(torch.tensor([[4, 5, 6]]), room=0)
    assert live.all() and kv[0, :, 0, 0, 0, 0].tolist() == [1, 0, 3]


def test_bytes_are_those_of_the_entries() -> None:
    cache = DraftKVCache(100, (3, 2, 4, 16), torch.bfloat16, "cpu")
    assert cache.nbytes == 101 * 3 * 2 * 4 * 16 * 2
