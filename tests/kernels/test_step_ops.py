"""Block preparation and acceptance against their twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import accept, candidates, largest, prepare_block, sample_filtered
from dflash_kernels.draft_ops import TritonOps
from torch import Tensor

from sglang_dflash.drafting.noise import PLAIN, BlockNoise, LogitScale, SampleFilters, gumbel
from sglang_dflash.drafting.ops import TorchOps
from tests.kernels.support import DEVICE, Canaries, counted_bytes

SIZES = pytest.mark.parametrize(
    ("requests", "block"), [(0, 4), (1, 2), (3, 7), (40, 16)], ids=["empty", "1x2", "3x7", "40x16"]
)


def ids(*shape: int, most: int = 9) -> Tensor:
    return torch.randint(most, shape, device=DEVICE)


@SIZES
def test_prepare_block(requests: int, block: int) -> None:
    bonus, seq_lens, canaries = ids(requests), ids(requests, most=300000), Canaries()
    empty = torch.full((requests, block), -7, dtype=torch.int64, device=DEVICE)
    got = canaries.around(empty), canaries.around(empty)
    expected = TorchOps().prepare_block(bonus, seq_lens, block, 248077)
    with counted_bytes() as count:
        prepare_block.prepare_block(*got, bonus, seq_lens, 248077)
    count.check(prepare_block.traffic(requests, block))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert canaries.are_alive()
    if requests:
        assert got[0][0].tolist() == [bonus[0].item()] + [248077] * (block - 1)


@SIZES
def test_accept(requests: int, block: int) -> None:
    # Few different tokens, so that every length occurs; and rows of wider matrices.
    drafted = ids(requests, block + 3, most=2)[:, 1 : block + 1]
    target = ids(requests, block, most=2)
    if requests:
        drafted[0, 1:] = target[0, :-1]  # all accepted
    if requests > 1:
        drafted[1] = -1  # as for a request that takes one token per step
    canaries, empty = Canaries(), torch.full((requests,), -7, device=DEVICE)
    got = canaries.around(empty), canaries.around(empty)
    with counted_bytes() as count:
        accept.accept(*got, drafted, target)
    count.check(accept.traffic(requests, block))
    expected = TorchOps().accept(drafted, target)
    assert torch.equal(got[0], expected.lengths) and torch.equal(got[1], expected.bonus)
    assert canaries.are_alive()
    if requests == 40:
        assert set(got[0].tolist()) >= {1, 2, 3, block}


LARGEST = {
    # R, P, V; what is odd about it.
    "several-chunks": (3, 4, 2 * largest.CHUNK + 77),
    "one-draft": (2, 1, 50),
    "many-requests": (8, 3, 300),
    "a-rank": (2, 2, 1000),
    # Of a draft vocabulary, and a draft whose logits are capped.
    "scaled": (4, 2, 300),
}


@pytest.mark.parametrize("case", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_largest(case: str, dtype: torch.dtype) -> None:
    requests, drafts, vocab = LARGEST[case]
    scale = LogitScale(0.7, 3.0) if case == "scaled" else PLAIN
    first_id, count = (vocab if case in ("a-rank", "scaled") else 0), requests * drafts
    logits = (4 * torch.randn(count, vocab + 8, device=DEVICE)).to(dtype)[:, :vocab]
    temperatures = torch.rand(requests, device=DEVICE) + 0.3
    temperatures[1::3] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), device=DEVICE)
    noise = BlockNoise(seeds, temperatures, ids(requests, most=300000))
    if case == "one-draft":
        logits[0] = -torch.inf  # nothing is the largest
    if case == "many-requests":
        logits[5, 7], logits[9, 8] = torch.nan, torch.inf
        logits[12, 20:30] = logits[12].max() + 1  # of equal ones, the first
    columns = first_id + vocab
    token_ids = 5 + 3 * torch.arange(columns, device=DEVICE) if case == "scaled" else None
    canaries = Canaries()
    best = canaries.around(torch.full((2, count), -7.0, device=DEVICE))
    tokens = canaries.around(torch.full((2, count), -7, dtype=torch.int64, device=DEVICE))
    with counted_bytes() as counted:
        largest.largest(best, tokens, logits, *noise, first_id, scale, token_ids)
    if token_ids is None:
        counted.check(largest.traffic(count, vocab, logits.element_size()))
    assert canaries.are_alive()
    expected, likeliest = TorchOps().largest(logits, noise, first_id, scale, token_ids)
    finite = expected.isfinite()
    assert torch.equal(best.isfinite(), finite)
    torch.testing.assert_close(best[finite], expected[finite], atol=2e-5, rtol=1e-5)
    assert torch.equal(tokens[0][finite[0]], likeliest[0][finite[0]])
    # Noise is float32 here and float64 there: another token is right if its score is as large.
    of_columns = torch.arange(columns, device=DEVICE) if token_ids is None else token_ids
    rows = noise.scores(
        logits.unflatten(0, (requests, drafts)), of_columns[first_id:], scale=scale
    ).flatten(0, 1)
    taken = rows.gather(1, (tokens[1][:, None] - first_id).clamp(0, vocab - 1))[:, 0]
    torch.testing.assert_close(taken[finite[1]], expected[1][finite[1]], atol=2e-5, rtol=1e-5)
    if case == "many-requests":
        assert tokens[0, 12] == 20 and not finite[:, [5, 9]].any()


def test_the_kernels_noise_is_the_targets() -> None:
    """They are equal to float32's rounding, also where noise is largest: there it decides."""
    count = 200_000
    noise = BlockNoise(ids(1, most=99), torch.ones(1, device=DEVICE), ids(1, most=99))
    tokens = torch.arange(count, device=DEVICE)
    exact = gumbel(noise.seeds, noise.seq_lens, tokens)
    likely = exact.topk(20).indices
    for token in [*likely.tolist(), int(exact.argmin()), 0, 5]:
        logits = torch.full((1, 1), 0.0, device=DEVICE)
        best, _ = TritonOps().largest(logits, noise, token)
        assert float(best[1, 0]) == pytest.approx(float(exact[token]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("requests", "positions", "vocab", "dtype"),
    [(32, 1, 20, torch.float32), (2, 2, 101, torch.bfloat16), (1, 1, 5, torch.float32)],
    ids=str,
)
def test_sample_filtered(
    requests: int, positions: int, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several parts, with equal logits and forbidden ones, that keep few tokens or many."""
    # The interpreter sorts slowly.
    for module, name, value in (
        (candidates, "CHUNK", 8), (candidates, "CHUNKS", 4),
        (sample_filtered, "MOST_CANDIDATES", 8), (sample_filtered, "BLOCK", 32),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    count = requests * positions
    logits = torch.randint(0, 5, (count, vocab + 3), device=DEVICE).to(dtype)[:, :vocab]
    logits[::5, : vocab // 2] = -torch.inf
    logits[1::3] = 2
    every = torch.arange(requests, device=DEVICE)
    top_ks = torch.randint(2, 20, (requests,), dtype=torch.int32, device=DEVICE)
    top_ks[every % 3 == 0] = 2**30
    top_ks[1:2] = 1
    temperatures = torch.rand(requests, device=DEVICE) + 1.5
    temperatures[1:2] = 0
    top_ps = (torch.rand(requests, device=DEVICE) + 0.4).clamp(max=1)
    min_ps = (1.6 * torch.rand(requests, device=DEVICE) - 0.6).clamp(min=0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), device=DEVICE)
    noise = BlockNoise(seeds, temperatures, ids(requests, most=300000))
    filters, canaries = SampleFilters(top_ks, top_ps, min_ps), Canaries()
    out = canaries.around(torch.full((count,), -7, dtype=torch.int64, device=DEVICE))
    sample_filtered.sample_filtered(out, logits, noise, filters)
    assert canaries.are_alive()
    assert torch.equal(out, TorchOps().sample_filtered(logits, noise, filters))
    if requests > 1:
        likeliest = logits[positions : 2 * positions].float()
        assert torch.equal(out[positions : 2 * positions], likeliest.argmax(-1))
