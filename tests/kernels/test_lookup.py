"""Looking up what a request has seen: the kernel and its twin against loops over lists."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import lookup

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.lookup import continue_seen
from tests.drafting.lookup_reference import continued
from tests.kernels.support import DEVICE, GARBAGE, Canaries, counted_bytes

# Lengths of texts before their newest tokens, how many different tokens they have, and the size of
# the vocabulary: of two tokens, everything has been seen before; token 3 is no token of three.
CASES = {
    "two-tokens": ([1, 2, 5, 40, 199], 2, 9),
    "few": ([9, 60, 30, 200], 5, 9),
    "many": ([120, 17, 200, 64], 30, 99),
    "images": ([50, 200, 80, 3], 4, 3),
    "begun": ([0, 1, 16], 2, 9),
    "none": ([], 2, 9),
}


@pytest.mark.parametrize(("lengths", "tokens", "vocab"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("block", [2, 7, 16])
def test_the_kernel_and_its_twin_find_the_same(
    lengths: list[int], tokens: int, vocab: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "PIECE", 32)
    monkeypatch.setattr(lookup, "PIECES", 2)
    torch.manual_seed(block)
    rows = torch.arange(len(lengths), device=DEVICE).flip(0) + 1
    texts = torch.full((len(lengths) + 2, 230), GARBAGE, dtype=torch.int32, device=DEVICE)
    given = torch.randint(tokens, (len(lengths), block), device=DEVICE)
    expected, replaced = [], []
    for row, length, (bonus, *drafts) in zip(rows, lengths, given.tolist(), strict=True):
        texts[row, :length] = torch.randint(tokens, (length,), device=DEVICE).int()
        # As if the newest token had stood after the text's end.
        texts[row, length:] = bonus
        after, seen = continued([*texts[row, :length].tolist(), bonus], drafts, vocab)
        expected.append([bonus, *after])
        replaced.append(seen)
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    requests = RequestSlots(texts, rows, seq_lens, max(lengths, default=0))
    for run in (continue_seen, lookup.continue_seen):
        canaries, before = Canaries(), texts.clone()
        drafts = canaries.around(given)
        taken = run(drafts, texts, requests, vocab)
        assert taken.tolist() == replaced
        assert drafts.tolist() == expected
        assert canaries.are_alive() and torch.equal(texts, before)


def test_bytes() -> None:
    """Without a match each token is read once; of a repeated text, once more per token that is
    compared, and its continuation."""
    lengths, block = [40, 24], 5
    texts = torch.arange(80, dtype=torch.int32, device=DEVICE).view(2, 40)
    rows, seq_lens = torch.arange(2, device=DEVICE), torch.tensor(lengths, device=DEVICE)
    given = torch.full((2, block), 99, device=DEVICE)
    requests = RequestSlots(texts, rows, seq_lens, 40)
    with counted_bytes() as count:
        lookup.continue_seen(given.clone(), texts, requests, 100)
    once = lookup.take_traffic(2, 40, block, seen=2 * (block - 1))
    count.check(lookup.find_traffic(lengths, 40) + once)
    texts[1, 20:24] = texts[1, 3:7]
    given[1, 0] = texts[1, 7]
    with counted_bytes() as count:
        lookup.continue_seen(given, texts, requests, 100)
    # Five tokens agree, the one before them does not.
    once = lookup.take_traffic(2, 40, block, seen=2 * (block - 1), taken=block - 1)
    count.check(lookup.find_traffic(lengths, 40, compared=5) + once)
