"""Entries of a ring for new tokens, against the twin, bit for bit."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import place

from sglang_dflash.drafting.kv import Tags
from sglang_dflash.drafting.kv.place import place_in_ring
from tests.kernels.support import DEVICE, Canaries, counted_bytes

SLOTS = 400
# Entries, entries in use, cursor, tokens, live share of them (None for no mask), fair share.
CASES = {
    "one-entry": (1, 0, 0, 1, None, None),
    "unused-ones": (100, 40, 55, 30, None, None),
    "wraps-around": (100, 30, 95, 40, 0.7, None),
    "at-a-chunks-edge": (96, 20, 32, 50, 0.5, None),
    "exactly-the-unused": (100, 60, 50, 40, None, None),
    "one-more-than-unused": (100, 60, 50, 41, None, None),
    "the-oldest-of-all": (100, 90, 77, 60, 0.9, None),
    "more-than-entries": (70, 30, 41, 200, None, None),
    "more-live-than-entries": (70, 30, 41, 200, 0.6, None),
    "all-in-use": (64, 64, 63, 20, 0.5, None),
    "dead-tokens": (64, 10, 7, 20, 0.0, None),
    "dead-tokens-all-in-use": (64, 64, 7, 20, 0.0, 3),
    "share-of-unused": (100, 95, 60, 40, None, 8),
    "share-below-unused": (100, 40, 99, 80, 0.9, 8),
    "share-of-none": (100, 100, 3, 40, 0.5, 0),
    "share-above-entries": (50, 50, 3, 90, None, 70),
}


def inputs(case: str) -> tuple[Tags, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    entries, used, cursor, count, live_share, _ = CASES[case]
    in_use = torch.zeros(entries + 1, dtype=torch.bool)
    in_use[torch.randperm(entries)[:used]] = True
    owner = torch.randint(SLOTS, (entries + 1,), dtype=torch.int32)
    owner[entries] = -1
    tags = Tags(torch.randint(entries, (SLOTS,), dtype=torch.int32), owner, in_use)
    live = None if live_share is None else torch.rand(count) < live_share
    slots = torch.randperm(SLOTS)[:count]
    if live is not None:
        # Rows of padding share a slot.
        slots[~live] = torch.where(torch.rand(int((~live).sum())) < 0.5, slots[~live][:1], 0)
        slots[live] = torch.randperm(SLOTS - 1)[: int(live.sum())] + 1
        slots[~live & torch.isin(slots, slots[live])] = 0
        live = live.to(DEVICE)
    tags = Tags(*(tag.to(DEVICE) for tag in tags))
    return tags, torch.full((1,), cursor, device=DEVICE), slots.to(DEVICE), live


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_their_twin(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several chunks, programs and tiles, and in the steps after it."""
    for name, size in (("CHUNK", 32), ("BLOCK", 16), ("TILE", 2)):
        monkeypatch.setattr(place, name, size)
    tags, cursor, slots, live = inputs(case)
    canaries, share = Canaries(), CASES[case][-1]
    got = Tags(*(canaries.around(tag) for tag in tags)), canaries.around(cursor)
    for _ in range(3):
        placed = place.place_in_ring(*got, slots, live, share)
        expected = place_in_ring(tags, cursor, slots, live, share)
        assert torch.equal(placed, expected)
        for actual, twin in zip((*got[0], got[1]), (*tags, cursor), strict=True):
            assert torch.equal(actual, twin)
    assert canaries.are_alive()


def test_random_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries stay the same over many steps with other entries in use."""
    monkeypatch.setattr(place, "CHUNK", 16)
    tags, cursor, _, _ = inputs("share-below-unused")
    got, own_cursor = Tags(*(tag.clone() for tag in tags)), cursor.clone()
    for step in range(30):
        slots = torch.randperm(SLOTS, device=DEVICE)[: 5 + step]
        live = torch.rand(len(slots), device=DEVICE) < 0.6
        in_use = torch.rand(tags.in_use.shape, device=DEVICE) < 0.7
        tags.in_use.copy_(in_use)
        got.in_use.copy_(in_use)
        placed = place.place_in_ring(got, own_cursor, slots, live, 7 if step % 2 else None)
        expected = place_in_ring(tags, cursor, slots, live, 7 if step % 2 else None)
        assert torch.equal(placed, expected) and torch.equal(own_cursor, cursor)
        assert all(map(torch.equal, got, tags))


def test_traffic() -> None:
    entries, count = 3 * place.CHUNK - 5, place.BLOCK + 44
    owner = torch.full((entries + 1,), -1, dtype=torch.int32, device=DEVICE)
    entry_of = torch.full((SLOTS,), entries, dtype=torch.int32, device=DEVICE)
    tags = Tags(entry_of, owner, torch.zeros(entries + 1, dtype=torch.bool, device=DEVICE))
    cursor = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(count, device=DEVICE)
    live = torch.ones(count, dtype=torch.bool, device=DEVICE)
    with counted_bytes() as counted:
        placed = place.place_in_ring(tags, cursor, slots, live, None)
    assert torch.equal(placed, slots) and cursor.item() == count
    counted.check(place.traffic(count, entries))


def test_what_it_refuses() -> None:
    tags, cursor, slots, _ = inputs("unused-ones")
    with pytest.raises(ValueError, match="target_slots: strides"):
        place.place_in_ring(tags, cursor, slots[::2], None, None)
    assert place.place_in_ring(tags, cursor, slots[:0], None, None).shape == (0,)
