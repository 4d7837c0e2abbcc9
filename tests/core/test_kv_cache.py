"""DraftKVCache against a plain model of it: a list of entries, what is in use, and where the next one goes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.core.kv_cache import DraftKVCache, IdentityDraftKVCache

TARGET_SLOTS = 24
SHAPE = (1, 2, 1, 1)


def cache_of(num_slots: int) -> DraftKVCache:
    return DraftKVCache(num_slots, TARGET_SLOTS, SHAPE, torch.float32, "cpu")


def stamped(values: list[int]) -> torch.Tensor:
    """K/V entries that carry a number, so that a stranger's entry is told from one's own."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None, None].expand(-1, *SHAPE)


class PlainRing:
    """The rule in plain Python: from the cursor on, overwrite what is not in use; if that is too little, whatever comes."""

    def __init__(self, num_slots: int) -> None:
        self.size = num_slots
        self.clear()

    def clear(self) -> None:
        self.entries: list[tuple[int, int] | None] = [None] * self.size  # (target slot, number)
        self.in_use: set[int] = set()
        self.cursor = 0

    def forget(self, targets: list[int]) -> None:
        self.entries = [None if e is not None and e[0] in targets else e for e in self.entries]

    def write(self, tokens: list[tuple[int, int]], share: int | None) -> None:
        order = [(self.cursor + i) % self.size for i in range(self.size)]
        free = [slot for slot in order if slot not in self.in_use]
        room = self.size if share is None else min(self.size, max(share, len(free)))
        written = tokens[max(0, len(tokens) - room) :]
        # Too many for one write of all they are: then the free ones are no better than others.
        enough = len(free) >= (len(tokens) if share is None else len(written))
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
keeps, shares = (
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.one_of(st.none(), st.integers(0, 20)),
)
write = st.tuples(st.just("write"), slots, keeps, shares)
forget, read = (
    st.tuples(st.just(kind), slots, st.none(), st.none()) for kind in ("forget", "read")
)
clear = st.tuples(st.just("clear"), st.none(), st.none(), st.none())


@settings(max_examples=400, deadline=None)
@given(
    num_slots=st.integers(1, 16),
    operations=st.lists(st.one_of(write, write, write, read, read, forget, clear), max_size=24),
)
def test_behaves_as_a_ring_that_spares_what_is_in_use(num_slots: int, operations: list) -> None:
    """Recycled target slots, overwritten entries, rejected tokens and more live tokens than the ring holds."""
    cache, plain, number = cache_of(num_slots), PlainRing(num_slots), 0
    for kind, targets, keep, share in [
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
            cache.write(torch.tensor(targets), stamped(numbers), torch.tensor(kept), share)
            plain.forget(targets)
            plain.write(
                [(t, n) for t, n, k in zip(targets, numbers, kept, strict=True) if k], share
            )
        else:
            wanted = torch.zeros(TARGET_SLOTS, dtype=torch.bool)
            wanted[targets] = True
            found, live = cache.gather(torch.arange(TARGET_SLOTS)[None], wanted[None], room=1)
            expected = plain.read(targets)
            assert {t for t in range(TARGET_SLOTS) if live[0, t]} == set(expected)
            for target, stamp in expected.items():
                assert found[0, target].flatten().tolist() == [stamp, stamp]
        alive = sum(e is not None for e in plain.entries)
        assert abs(cache.live_share() - alive / num_slots) < 1e-6


def test_what_a_request_reads_outlives_any_number_of_others() -> None:
    """Sinks and the window of a long request stay while short requests come and go through the rest of the ring."""
    cache, mine = cache_of(8), torch.tensor([[0, 1, 2, 3]])
    cache.write(mine[0], stamped([1, 2, 3, 4]))
    for i in range(20):
        _, live = cache.gather(mine, torch.ones(1, 4, dtype=torch.bool), room=0)
        assert live.all()
        cache.write(torch.arange(4, 7) + 3 * (i % 5), stamped([9, 9, 9]))


def test_a_prompt_yields_to_what_is_read() -> None:
    """A prompt larger than what is free takes that, or its share; its last tokens are those that stay."""
    for share, survivors in ((1, [5, 6]), (3, [4, 5, 6])):
        cache, mine = cache_of(6), torch.arange(10, 14)
        cache.write(mine, stamped([1, 2, 3, 4]))
        cache.gather(mine[None], torch.ones(1, 4, dtype=torch.bool), room=0)
        cache.write(torch.arange(7), stamped(list(range(7))), share=share)
        assert cache.find(torch.arange(7))[1].nonzero()[:, 0].tolist() == survivors
        assert int(cache.find(mine)[1].sum()) == (4 if share == 1 else 1 + 2)


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
    both = torch.ones(1, 2, dtype=torch.bool)
    kv, live = cache.gather(torch.tensor([[5, 6]]), both, room=3)
    kv[:, -3:] = 99
    again, _ = cache.gather(torch.tensor([[5, 6]]), both, room=0)
    assert live.all() and again.flatten().tolist() == [1, 1, 2, 2]


def test_identity_map_keeps_everything_but_rejected_tokens() -> None:
    cache = IdentityDraftKVCache(TARGET_SLOTS, SHAPE, torch.float32, "cpu")
    cache.entries.zero_()
    cache.write(torch.tensor([4, 5, 6]), stamped([1, 2, 3]), torch.tensor([True, False, True]))
    kv, live = cache.gather(torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool), room=0)
    assert live.all() and kv[0, :, 0, 0, 0, 0].tolist() == [1, 0, 3]


def test_bytes_are_those_of_the_entries() -> None:
    cache = DraftKVCache(100, TARGET_SLOTS, (3, 2, 4, 16), torch.bfloat16, "cpu")
    assert cache.nbytes == 101 * 3 * 2 * 4 * 16 * 2
