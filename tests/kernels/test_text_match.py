"""The search of a text: the kernel and its twin against loops over lists."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import text_match

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.text_match import SHORTEST_MATCH, find_match
from tests.drafting.match_reference import continued
from tests.kernels.support import DEVICE, GARBAGE, Canaries, counted_bytes

# Lengths of texts before their newest tokens, and how many different tokens they have: of two
# tokens, everything has stood before.
CASES = {
    "two-tokens": ([1, 2, 5, 40, 199], 2),
    "few": ([9, 60, 30, 200], 5),
    "many": ([120, 17, 200, 64], 30),
    "begun": ([0, 1, 16], 2),
    "none": ([], 2),
}


@pytest.mark.parametrize(("lengths", "tokens"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("count", [1, 6, 15])
def test_the_kernel_and_its_twin_find_the_same(
    lengths: list[int], tokens: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_match, "PIECE", 32)
    monkeypatch.setattr(text_match, "PIECES", 2)
    torch.manual_seed(count)
    rows = torch.arange(len(lengths), device=DEVICE).flip(0) + 1
    texts = torch.full((len(lengths) + 2, 230), GARBAGE, dtype=torch.int32, device=DEVICE)
    newest = torch.randint(tokens, (len(lengths),), device=DEVICE)
    expected = []
    for row, length, bonus in zip(rows, lengths, newest.tolist(), strict=True):
        texts[row, :length] = torch.randint(tokens, (length,), device=DEVICE).int()
        # As if the newest token had stood after the text's end.
        texts[row, length:] = bonus
        expected.append(continued([*texts[row, :length].tolist(), bonus], count))
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    requests = RequestSlots(texts, rows, seq_lens, max(lengths, default=0))
    for run in (find_match, text_match.find_match):
        canaries, before = Canaries(), texts.clone()
        matches, followed = run(canaries.around(newest), texts, requests, count)
        assert followed.shape == (len(lengths), count)
        assert followed.dtype == matches.dtype == torch.int64
        found = zip(matches.tolist(), followed.tolist(), strict=True)
        assert [(n, after) if n >= SHORTEST_MATCH else (0, []) for n, after in found] == expected
        assert canaries.are_alive() and torch.equal(texts, before)


def test_bytes() -> None:
    """Without a match each token is read once; of a repeated text, once more per token that is
    compared."""
    lengths, count = [40, 24], 4
    texts = torch.arange(80, dtype=torch.int32, device=DEVICE).view(2, 40)
    rows, seq_lens = torch.arange(2, device=DEVICE), torch.tensor(lengths, device=DEVICE)
    newest = torch.full((2,), 99, device=DEVICE)
    requests = RequestSlots(texts, rows, seq_lens, 40)
    taken = text_match.take_traffic(2, 40, count, in_text=2 * count)
    with counted_bytes() as counted:
        text_match.find_match(newest, texts, requests, count)
    counted.check(text_match.find_traffic(lengths, 40) + taken)
    texts[1, 20:24] = texts[1, 3:7]
    newest[1] = texts[1, 7]
    with counted_bytes() as counted:
        text_match.find_match(newest, texts, requests, count)
    # Five tokens agree, the one before them does not.
    counted.check(text_match.find_traffic(lengths, 40, compared=5) + taken)
