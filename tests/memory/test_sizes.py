"""Draft K/V that is allocated beside the target's pool is what the sizing charged."""

from __future__ import annotations

from itertools import product

import pytest

from sglang_dflash.memory.sizes import Charge, GroupKVSize, draft_kv_charge

TARGET, RING = 8192, 10_000


@pytest.mark.parametrize("token_bytes", [(512,), (20_480,), (512, 1024), (1024, 40, 512)])
def test_what_is_allocated_is_what_was_charged(token_bytes: tuple[int, ...]) -> None:
    """Beside every pool about as large as a ring: a ring takes 5 bytes per entry, and 4 per target
    token, beside its K/V. No pool with more tokens would fit."""
    seen = set()
    for rings in product((RING - 30, RING, None), repeat=len(token_bytes)):
        groups = [GroupKVSize(*sizes) for sizes in zip(token_bytes, rings, strict=True)]
        whole = RING * (TARGET + sum(token_bytes))
        for budget in range(whole - 40 * RING, whole + 3000 * RING, 7 * RING + 1):

            def fits(charge: Charge, budget: int = budget) -> int:
                return (budget - charge.once) // (TARGET + charge.per_token)

            charge = draft_kv_charge(groups, fits)
            tokens = fits(charge)
            assert Charge.of(groups, tokens) == charge
            assert charge.total(tokens) + tokens * TARGET <= budget
            larger = tokens + 1
            assert Charge.of(groups, larger).total(larger) + larger * TARGET > budget
            entries = [group.entries(tokens) for group in groups]
            assert sum(ring * (size + 5) + 4 * tokens if ring else size * tokens
                       for ring, size in zip(entries, token_bytes, strict=True)
                       ) == charge.total(tokens)  # fmt: skip
            seen.add(tuple(ring is not None for ring in entries))
    assert len(seen) == 2 ** len(token_bytes)


def test_a_pool_that_is_smaller_than_it_was_sized_takes_no_more() -> None:
    """SGLang rounds the pool to pages, and another rank or a flag may make it smaller."""
    groups = [GroupKVSize(512, RING), GroupKVSize(40, RING)]
    for sized in range(RING - 100, 3 * RING, 501):
        charge = Charge.of(groups, sized)
        for tokens in range(0, sized, 97):
            assert Charge.of(groups, tokens).total(tokens) <= charge.total(tokens)
