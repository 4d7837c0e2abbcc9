"""Draft KV caches against a plain model: a list of entries, those in use, and the next to write."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.checkpoint.draft_config import WHOLE_CONTEXT
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.ops import TorchOps, context_table
from tests.conftest import write_kv

TARGET_SLOTS = 24
SHAPE = (1, 2, 1, 1)


def cache_of(num_entries: int) -> RingKVCache:
    return RingKVCache(num_entries, TARGET_SLOTS, SHAPE, torch.float32, "cpu")


def stamped(values: list[int]) -> torch.Tensor:
    """K/V entries that carry a number, to tell whose they are."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None, None].expand(-1, *SHAPE)


def read_by_request(cache: DraftKVCache, targets: list[int]) -> list[int]:
    """Entries of the target slots of one running request, -1 for lost ones."""
    slots, one = torch.tensor([targets], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    request = RequestSlots(slots, one, one + len(targets), len(targets))
    return context_table(TorchOps(), request, WHOLE_CONTEXT, cache.tags).entries[0].tolist()


class PlainRing:
    """The rule in plain Python: from the cursor on, overwrite unused entries; if too few, any."""

    def __init__(self, num_entries: int) -> None:
        self.size = num_entries
        self.clear()

    def clear(self) -> None:
        self.entries: list[tuple[int, int] | None] = [None] * self.size  # (target slot, number)
        self.in_use: set[int] = set()
        self.cursor = 0

    def forget(self, targets: list[int]) -> None:
        self.entries = [None if e is not None and e[0] in targets else e for e in self.entries]

    def write(self, tokens: list[tuple[int, int]], fair_share: int | None) -> None:
        order = [(self.cursor + i) % self.size for i in range(self.size)]
        free = [slot for slot in order if slot not in self.in_use]
        limit = self.size if fair_share is None else min(self.size, max(fair_share, len(free)))
        written = tokens[max(0, len(tokens) - limit) :]
        # If the unused entries do not hold a whole write, all entries are alike.
        enough = len(free) >= (len(tokens) if fair_share is None else len(written))
        for token, slot in zip(written, free if enough else order, strict=False):
            self.entries[slot] = token
            self.in_use.add(slot)
            self.cursor = (slot + 1) % self.size

    def read(self, targets: list[int]) -> dict[int, int]:
        found = {
            e[0]: (slot, e[1])
            for slot, e in enumerate(self.entries)
            if e is not None and e[0] in targets
        }
        self.in_use = {slot for slot, _ in found.values()}
        return {target: number for target, (_, number) in found.items()}


slots = st.lists(st.integers(0, TARGET_SLOTS - 1), min_size=1, max_size=12, unique=True)
keeps, fair_shares = (
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.one_of(st.none(), st.integers(0, 20)),
)
write = st.tuples(st.just("write"), slots, keeps, fair_shares)
forget, read = (
    st.tuples(st.just(kind), slots, st.none(), st.none()) for kind in ("forget", "read")
)
clear = st.tuples(st.just("clear"), st.none(), st.none(), st.none())


@settings(max_examples=400, deadline=None)
@given(
    num_entries=st.integers(1, 16),
    operations=st.lists(st.one_of(write, write, write, read, read, forget, clear), max_size=24),
)
def test_behaves_as_a_ring_that_spares_what_is_in_use(num_entries: int, operations: list) -> None:
    """Recycled target slots, overwritten entries, rejected tokens, more tokens than entries."""
    cache, plain, number = cache_of(num_entries), PlainRing(num_entries), 0
    for kind, targets, keep, fair_share in [
        *operations,
        ("read", list(range(TARGET_SLOTS)), None, None),
    ]:
        if kind == "clear":
            cache.clear()
            plain.clear()
        elif kind == "forget":
            cache.forget(torch.tensor(targets))
            plain.forget(targets)
        elif kind == "write":
            numbers = list(range(number, number + len(targets)))
            number += len(targets)
            kept = keep[: len(targets)]
            write_kv(cache, torch.tensor(targets), stamped(numbers), torch.tensor(kept), fair_share)
            plain.forget(targets)
            plain.write(
                [(t, n) for t, n, k in zip(targets, numbers, kept, strict=True) if k], fair_share
            )
        else:
            found = dict(zip(targets, read_by_request(cache, targets), strict=True))
            expected = plain.read(targets)
            assert {target for target, entry in found.items() if entry >= 0} == set(expected)
            for target, stamp in expected.items():
                assert cache.kv[found[target]].flatten().tolist() == [stamp, stamp]
        live_entries = sum(e is not None for e in plain.entries)
        assert abs(cache.live_share() - live_entries / num_entries) < 1e-6


# -- the same rule in fixed examples


def test_unused_entries_are_overwritten_oldest_first() -> None:
    cache = cache_of(6)
    write_kv(cache, torch.tensor([0, 1, 2, 3]), stamped([1, 2, 3, 4]))
    read_by_request(cache, [20])  # Nothing is in use.
    write_kv(cache, torch.tensor([4, 5]), stamped([5, 6]))
    assert min(read_by_request(cache, [0, 1, 2, 3, 4, 5])) >= 0
    read_by_request(cache, [20])
    write_kv(cache, torch.tensor([6]), stamped([7]))
    assert [entry >= 0 for entry in read_by_request(cache, [0, 1, 2])] == [False, True, True]


def test_a_slot_is_dead_once_its_token_was_rejected() -> None:
    """Its last owner's entry is not found, nor the padding entry that rejected tokens go to."""
    cache, slots = cache_of(6), torch.tensor([7, 8, 9])
    write_kv(cache, slots, stamped([1, 2, 3]))
    write_kv(cache, slots, stamped([4, 5, 6]), torch.tensor([True, False, False]))
    entries = read_by_request(cache, [7, 8, 9])
    assert entries[1:] == [-1, -1] and cache.kv[entries[0]].unique().item() == 4
    assert cache.find(slots)[1].tolist() == [True, False, False]


def test_an_overwritten_entry_is_not_found_by_its_last_owner() -> None:
    cache = cache_of(3)
    write_kv(cache, torch.tensor([0, 1, 2]), stamped([1, 2, 3]))
    write_kv(cache, torch.tensor([3, 4]), stamped([4, 5]))
    entries = read_by_request(cache, [0, 1, 2, 3, 4])
    assert entries[:2] == [-1, -1] and min(entries[2:]) >= 0


def test_what_a_request_reads_outlives_any_number_of_others() -> None:
    """A long request's entries stay while short requests pass through the rest of the ring."""
    cache, mine = cache_of(8), [0, 1, 2, 3]
    write_kv(cache, torch.tensor(mine), stamped([1, 2, 3, 4]))
    for i in range(20):
        assert min(read_by_request(cache, mine)) >= 0
        write_kv(cache, torch.arange(4, 7) + 3 * (i % 5), stamped([9, 9, 9]))


def test_a_prompt_yields_to_what_is_read() -> None:
    """A prompt too large for the unused entries takes these or its share; its last tokens stay."""
    for fair_share, survivors in ((1, [5, 6]), (3, [4, 5, 6])):
        cache, mine = cache_of(6), torch.arange(10, 14)
        write_kv(cache, mine, stamped([1, 2, 3, 4]))
        read_by_request(cache, mine.tolist())
        write_kv(cache, torch.arange(7), stamped(list(range(7))), fair_share=fair_share)
        assert cache.find(torch.arange(7))[1].nonzero()[:, 0].tolist() == survivors
        assert int(cache.find(mine)[1].sum()) == (4 if fair_share == 1 else 1 + 2)


def test_fresh_entries_are_marked_in_use() -> None:
    """Entries written since the last read are not overwritten while unused ones are left."""
    cache = cache_of(4)
    write_kv(cache, torch.tensor([0, 1]), stamped([1, 2]))
    cache.cursor.zero_()
    write_kv(cache, torch.tensor([2, 3]), stamped([3, 4]))
    assert cache.find(torch.arange(4))[1].all()


def test_direct_cache_keeps_everything_but_rejected_tokens() -> None:
    cache = DraftKVCache(TARGET_SLOTS, SHAPE, torch.float32, "cpu")
    cache.kv.zero_()
    write_kv(cache, torch.tensor([4, 5, 6]), stamped([1, 2, 3]), torch.tensor([True, False, True]))
    entries = read_by_request(cache, [4, 5, 6])
    assert min(entries) >= 0 and cache.kv[entries][:, 0, 0, 0, 0].tolist() == [1, 0, 3]


def test_only_a_bounded_cache_leaves_prompt_tokens_out() -> None:
    """Without marks a skipped token would leave the K/V of the slot's last owner in place."""
    visible, age = torch.tensor([True, False, True, True]), torch.tensor([1, 9, 0, 3])
    direct = DraftKVCache(TARGET_SLOTS, SHAPE, torch.float32, "cpu")
    assert cache_of(4).prompt_tokens_to_write(visible, age).tolist() == [3, 0, 2]
    assert torch.arange(4)[direct.prompt_tokens_to_write(visible, age)].tolist() == [0, 1, 2, 3]


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, *EIGHT_BITS], ids=str
)
def test_entries_are_finite(dtype: torch.dtype) -> None:
    """Whatever is written: a masked entry takes part in 0 times NaN."""
    cache, limit = DraftKVCache(TARGET_SLOTS, SHAPE, dtype, "cpu"), torch.finfo(dtype).max
    numbers = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 1e38, 0.0])
    kv = numbers[:, None, None, None, None].expand(-1, *SHAPE)
    beyond = min(limit, 1e38)
    for cast, narrowest in ((torch.float32, limit), (torch.float16, min(limit, 65504.0))):
        write_kv(cache, torch.arange(6), kv.to(cast))
        large = min(beyond, narrowest)
        expected = torch.tensor([0, narrowest, -narrowest, 1, large, 0]).to(dtype)
        assert torch.equal(cache.kv[:6, 0, 0, 0, 0].float(), expected.float())
    assert cache.kv.float().isfinite().all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("kind", ["ring", "direct"])
def test_8_bit_entries_saturate(kind: str, dtype: torch.dtype) -> None:
    """A cast makes infinity of what float8_e5m2 does not hold. It would reach every reader."""
    cache: DraftKVCache = DraftKVCache(TARGET_SLOTS, SHAPE, dtype, "cpu")
    if kind == "ring":
        cache = RingKVCache(8, TARGET_SLOTS, SHAPE, dtype, "cpu")
    kept, limit = torch.tensor([True, True, False, True]), torch.finfo(dtype).max
    write_kv(cache, torch.tensor([4, 5, 6, 7]), stamped([1, 10**6, 3, -(10**6)]), kept)
    entries, live = cache.find(torch.tensor([4, 5, 7]))
    assert live.all()
    assert cache.kv.float()[entries][:, 0, 0, 0, 0].tolist() == [1, limit, -limit]
