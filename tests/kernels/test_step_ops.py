"""Block preparation and acceptance against their twins, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_kernels import accept, candidates, prepare_block, sample_filtered, sample_whole
from dflash_kernels.draft_ops import TritonOps
from torch import Tensor

from sglang_dflash.drafting import target_samples
from sglang_dflash.drafting.noise import SAMPLED, BlockNoise, Proposal, SampleFilters, gumbel
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


WHOLE = {
    # R, W, V; what is odd about it.
    "several-chunks": (3, 4, 2 * sample_whole.CHUNK + 77),
    "one-position": (2, 1, 50),
    "many-requests": (8, 3, 300),
}


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sample_whole(case: str, dtype: torch.dtype) -> None:
    requests, positions, vocab = WHOLE[case]
    count = requests * positions
    logits = (4 * torch.randn(count, vocab + 8, device=DEVICE)).to(dtype)[:, :vocab]
    temperatures = torch.rand(requests, device=DEVICE) + 0.3
    temperatures[1::3] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), device=DEVICE)
    noise = BlockNoise(seeds, temperatures, ids(requests, most=300000))
    if case == "many-requests":
        logits[3, 20:30] = logits[3].max() + 1  # of equal ones, the first
        logits[5, 7] = torch.inf
    canaries = Canaries()
    tokens = canaries.around(torch.full((count,), -7, dtype=torch.int64, device=DEVICE))
    with counted_bytes() as counted:
        sample_whole.sample_whole(tokens, logits, noise, None)
    counted.check(sample_whole.traffic(logits))
    assert canaries.are_alive()
    # Noise is float32 here and float64 there: another token is right if its score is as large.
    columns = torch.arange(vocab, device=DEVICE)
    scores = noise.scores(logits.unflatten(0, (requests, positions)), columns).flatten(0, 1)
    taken = scores.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(taken, scores.amax(1), atol=2e-5, rtol=1e-5)
    if case == "many-requests":
        assert tokens[3] == 20 and tokens[5] == 7


def test_the_kernels_noise_is_the_targets() -> None:
    """They are equal to float32's rounding, also where noise is largest: there it decides."""
    count, more = 200_000, 2e-5
    noise = BlockNoise(ids(1, most=99), torch.ones(1, device=DEVICE), ids(1, most=99))
    exact = gumbel(noise.seeds, noise.seq_lens, torch.arange(count, device=DEVICE))
    likely = exact.topk(20).indices
    for token in [*likely[::7].tolist(), int(exact.argmin()), 0, 5]:
        # All scores are 0 but for rounding, and this one's is not.
        logits = -exact[None].float()
        logits[0, token] += more
        assert TritonOps().sample(logits, noise, None).item() == token


def proposal_of(logits: Tensor, noise: BlockNoise, k: int, drafts: int | None = None) -> Proposal:
    """Drafts of some requests that were drawn, from k tokens of which most are among the target's
    likeliest, and of the others. There are more drafts than the step has room for, or `drafts`, and
    other tokens behind them."""
    requests, positions, vocab = len(noise.seeds), len(logits) // len(noise.seeds), logits.shape[1]
    drafts = drafts or positions + 2
    own = logits.view(requests, positions, vocab).float()[:, :1].expand(-1, drafts, -1)
    best = (own + 4 * torch.rand_like(own)).topk(k).indices
    walked, scores = TorchOps().walk(
        torch.randn(requests, drafts, k, device=DEVICE), best, best[:, 0, 0], None, noise
    )
    if requests > 4:
        scores[4, 0, 1] = torch.nan  # of a draft that computed nothing finite
    looked_up = best[:, 0, :1].expand(-1, positions)
    block = torch.cat((best[:, 0, :1], walked[SAMPLED], looked_up), 1)[:, :positions]
    is_drawn = (torch.arange(requests, device=DEVICE) % 3 != 2) & (noise.temperatures > 0)
    return Proposal(block, is_drawn, best, scores)


def check_samples(
    tokens: Tensor, logits: Tensor, noise: BlockNoise, filters: Any, proposal: Proposal | None
) -> None:
    """The twin's, but for what a rounding decides: a twin of logits that are larger or smaller by
    a few roundings takes another one there, too. Behind a drawn draft that is not accepted, any."""
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    is_used = torch.ones_like(tokens) > 0
    if proposal is not None:
        by_request = tokens.view(proposal.block.shape)
        wrong = (by_request[:, :-1] != proposal.block[:, 1:]) & proposal.is_drawn[:, None]
        is_used.view(by_request.shape)[:, 1:] = wrong.cumsum(1) == 0
    near = [
        TorchOps().sample(logits.double() * (1 + change), noise, filters, proposal)
        for change in (0.0, 3e-5, -3e-5)
    ]
    is_right = torch.stack([tokens == one for one in near]).any(0)
    assert is_right[is_used].all() and (near[0] == tokens)[is_used].float().mean() > 0.98


@pytest.mark.parametrize(
    ("requests", "positions", "vocab", "k", "drafts"),
    [(9, 3, 300, 4, None), (40, 2, 40, 16, None), (3, 2, 9000, 3, None), (30, 5, 60, 16, 2)],
)
def test_samples_after_drawn_drafts(
    requests: int, positions: int, vocab: int, k: int, drafts: int | None
) -> None:
    logits = 2 * torch.randn(requests * positions, vocab, device=DEVICE)
    temperatures = torch.rand(requests, device=DEVICE) + 0.5
    temperatures[1] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), device=DEVICE)
    noise = BlockNoise(seeds, temperatures, ids(requests, most=300000))
    proposal, canaries = proposal_of(logits, noise, k, drafts), Canaries()
    out = canaries.around(torch.full((len(logits),), -7, dtype=torch.int64, device=DEVICE))
    sample_whole.sample_whole(out, logits, noise, proposal)
    assert canaries.are_alive()
    check_samples(out, logits, noise, None, proposal)
    if requests > 9:
        accepted = out.view(requests, -1)[:, :-1] == proposal.block[:, 1:]
        of_drawn = accepted[proposal.is_drawn][:, : drafts or 1]
        assert of_drawn.all(1).any() and not of_drawn.all()
        assert (out != TorchOps().sample(logits, noise, None)).any()


def test_rows_behind_a_rejected_draft_are_not_read_again() -> None:
    """All drafts are impossible. But for the sums one row of each request is read."""
    requests, positions, vocab = 2, 40, 9000
    seeds = torch.arange(requests, device=DEVICE)
    noise = BlockNoise(seeds, torch.ones(requests, device=DEVICE), seeds)
    logits = torch.randn(requests * positions, vocab, device=DEVICE)
    logits[:, 5] = -torch.inf
    block = torch.full((requests, positions), 5, device=DEVICE)
    scores = torch.zeros(requests, positions - 1, 1, device=DEVICE)
    proposal = Proposal(block, seeds >= 0, block[:, 1:, None].contiguous(), scores)
    with counted_bytes() as counted:
        TritonOps().sample(logits, noise, None, proposal)
    sums = candidates.chunk_traffic(len(logits), vocab, 4, sums=True)
    expected = sample_whole.drawn_traffic(logits, proposal.candidates)
    counted.check(sums + expected)
    assert expected.read_bytes < 0.5 * logits.nbytes


@pytest.mark.parametrize(
    ("requests", "positions", "vocab", "dtype"),
    [(32, 1, 20, torch.float32), (6, 2, 150, torch.bfloat16), (1, 1, 5, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("drawn", [False, True], ids=["", "drawn"])
def test_sample_filtered(
    requests: int,
    positions: int,
    vocab: int,
    dtype: torch.dtype,
    drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of several parts, with equal logits and forbidden ones, that keep few tokens or many."""
    # The interpreter sorts slowly.
    for module, name, value in (
        (candidates, "CHUNK", 8), (candidates, "CHUNKS", 4),
        (sample_filtered, "MOST_CANDIDATES", 8), (sample_filtered, "BLOCK", 32),
        (sample_filtered, "CHUNK", 64), (sample_whole, "CHUNK", 64), (sample_whole, "BLOCK", 32),
        (target_samples, "MOST_CANDIDATES", 8),
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
    is_touched = every % 9 != 6
    top_ps, min_ps = (x.where(is_touched, y) for x, y in ((top_ps, 1.0), (min_ps, 0.0)))
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), device=DEVICE)
    noise = BlockNoise(seeds, temperatures, ids(requests, most=300000))
    filters, canaries = SampleFilters(top_ks, top_ps, min_ps), Canaries()
    out = canaries.around(torch.full((count,), -7, dtype=torch.int64, device=DEVICE))
    proposal = proposal_of(logits, noise, min(3, vocab)) if drawn else None
    sample_filtered.sample_filtered(out, logits, noise, filters, proposal)
    assert canaries.are_alive()
    check_samples(out, logits, noise, filters, proposal)
    if requests > 1:
        likeliest = logits[positions : 2 * positions].float()
        assert torch.equal(out[positions : 2 * positions], likeliest.argmax(-1))


def test_a_request_without_filters_is_sampled_as_without_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its drafts that were drawn are accepted or not, bit for bit. The others keep more tokens than
    a program looks at."""
    for module, name, value in (
        (sample_whole, "CHUNK", 64), (sample_whole, "BLOCK", 32), (sample_filtered, "CHUNK", 64),
        (sample_filtered, "MOST_CANDIDATES", 8), (target_samples, "MOST_CANDIDATES", 8),
        (sample_filtered, "BLOCK", 32),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    # Each filter has two requests beside three without one.
    requests, positions, vocab = 12, 2, 200
    logits = torch.arange(vocab, device=DEVICE) * -0.01
    logits = logits + 0.05 * torch.randn(requests * positions, vocab, device=DEVICE)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), device=DEVICE)
    temperatures = torch.ones(requests, device=DEVICE)
    noise = BlockNoise(seeds, temperatures, ids(requests, most=999))
    every = torch.arange(requests, device=DEVICE)
    is_touched = every % 6 < 3
    # One filter each.
    filters = SampleFilters(
        torch.where(every % 6 == 0, 120, 2**30).int(),
        torch.where(every % 6 == 1, 0.8, 1.0),
        torch.where(every % 6 == 2, 0.3, 0.0),
    )
    proposal = proposal_of(logits, noise, 16)
    for ops in (TorchOps(), TritonOps()):
        filtered, whole = (
            ops.sample(logits, noise, which, proposal).view(requests, -1)
            for which in (filters, None)
        )
        assert torch.equal(filtered[~is_touched], whole[~is_touched])
        assert (filtered[is_touched] != whole[is_touched]).any()
    check_samples(filtered.flatten(), logits, noise, filters, proposal)


def test_traffic_of_filtered_samples() -> None:
    logits = torch.randn(3, 200, device=DEVICE)
    values, columns = torch.empty(3, 64, device=DEVICE), ids(3, 64)
    noise = BlockNoise(ids(3), torch.ones(3, device=DEVICE), ids(3))
    maxima, totals = torch.empty(2, 3, candidates.part_count(200), device=DEVICE)
    top_ks = torch.full((3,), 20, dtype=torch.int32, device=DEVICE)
    filters = SampleFilters(top_ks, noise.temperatures, torch.zeros_like(noise.temperatures))
    with counted_bytes() as of_candidates:
        candidates.candidates(values, columns, logits, candidates.Sums(maxima, totals, noise[1]))
    with counted_bytes() as counted:
        sample_filtered.sample_filtered(columns[:, 0].contiguous(), logits, noise, filters, None)
    counted.check(of_candidates.traffic + sample_filtered.traffic(values, 200))


def top_20(requests: int) -> SampleFilters:
    top_ks = torch.full((requests,), 20, dtype=torch.int32, device=DEVICE)
    return SampleFilters(
        top_ks, torch.ones(requests, device=DEVICE), torch.zeros(requests, device=DEVICE)
    )


@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
def test_a_token_that_is_not_kept_is_never_drawn(filtered: bool) -> None:
    """The draft is accepted if it is all that is left, whatever the random number: that of one of
    these seeds is all but 1."""
    seeds = torch.tensor([5926359, 1, 2, 3, 4], device=DEVICE)
    noise = BlockNoise(seeds, torch.ones(5, device=DEVICE), torch.full_like(seeds, 9))
    logits = torch.full((10, 300), -torch.inf, device=DEVICE)
    logits[:, 77] = 1.0
    block, scores = torch.full((5, 2), 77, device=DEVICE), torch.zeros(5, 1, 1, device=DEVICE)
    proposal = Proposal(block, seeds > 0, block[:, :1, None].contiguous(), scores)
    for ops in (TorchOps(), TritonOps()):
        tokens = ops.sample(logits, noise, top_20(5) if filtered else None, proposal)
        assert tokens.tolist() == [77] * 10


@pytest.mark.parametrize("forbidden", [-torch.inf, -1e30], ids=str)
@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
def test_the_target_has_what_is_drawn_if_nothing_is_left(forbidden: float, filtered: bool) -> None:
    """The draft is one that neither model has, so it is rejected, and p - q leaves no token
    anything. By rounding that happens wherever no probability of the target is above the draft's.

    SGLang writes the second number for -inf if it is asked to."""
    seeds = torch.arange(5, device=DEVICE)
    noise = BlockNoise(seeds, torch.ones(5, device=DEVICE), seeds)
    logits = torch.full((10, 300), forbidden, device=DEVICE)
    logits[:, 77] = 0.0
    candidates = torch.full((5, 1, 1), 77, device=DEVICE)
    block, scores = torch.full((5, 2), 78, device=DEVICE), torch.zeros(5, 1, 1, device=DEVICE)
    proposal = Proposal(block, seeds >= 0, candidates, scores)
    for ops in (TorchOps(), TritonOps()):
        tokens = ops.sample(logits, noise, top_20(5) if filtered else None, proposal)
        assert tokens[::2].tolist() == [77] * 5
