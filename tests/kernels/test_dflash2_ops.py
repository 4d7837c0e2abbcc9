"""Convolution, candidates and walk of DFlash2 against their twins."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import candidates, convolve, walk
from dflash_kernels.draft_ops import TritonOps
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.noise import SAMPLED, BlockNoise
from sglang_dflash.drafting.ops import Edges, TorchOps
from sglang_dflash.drafting.parallel import TensorParallel, candidates_of_ranks
from tests.conftest import raw_config, with_own
from tests.errors import refused
from tests.kernels.support import DEVICE, Canaries, counted_bytes
from tests.kernels.test_fused_ops import check_close, some

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("requests", "block", "width", "group", "taps"),
    [
        (3, 4, 32, 8, 2),
        (2, 7, 45, 15, 3),
        (1, 2, 1100, 4, 4),
        (5, 3, 352, 16, 2),
        (2, 1, 8, 8, 2),
        (0, 4, 32, 8, 2),
    ],
)
@DTYPES
def test_convolve(
    dtype: torch.dtype, requests: int, block: int, width: int, group: int, taps: int, bias: bool
) -> None:
    x, base = some(requests, block, width, dtype=dtype), some(taps, width, dtype=dtype)
    # Half of a projection, as the layers have it.
    dynamic = some(requests, block, 2, taps, width // group, dtype=dtype)[:, :, 1]
    added = some(width, dtype=dtype) if bias else None
    canaries = Canaries()
    out = canaries.around(torch.full_like(x, 9.0))
    with counted_bytes() as bytes_:
        convolve.convolve(out, x, added, base, dynamic)
    shape = requests, block, width, taps, width // group
    bytes_.check(convolve.traffic(*shape, x.element_size(), bias))
    exact = (t if t is None else t.float() for t in (x, base, dynamic, added))
    check_close(out, TorchOps().convolve(*exact), dtype)
    assert canaries.are_alive()


def tied(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Few values, so that many are equal; rows of a wider matrix. The last row is not finite."""
    logits = some(count, width + 3, dtype=dtype)[:, :width]
    logits.copy_(torch.randint(-2, 3, logits.shape))
    # Both zeros are equal.
    logits[:, ::3] *= -1.0
    if count > 1:
        logits[-1] = -torch.inf
        logits[-1, width // 2] = torch.inf
        logits[-1, [1, width - 1]] = torch.nan
        logits[-1, 2] = -logits[-1, 1]
    return logits


@pytest.mark.parametrize(
    ("count", "width", "k"), [(3, 64, 16), (2, 301, 5), (1, 128, 1), (2, 70, 64), (0, 64, 2)]
)
@DTYPES
def test_candidates(
    dtype: torch.dtype, count: int, width: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and as a stable sort of everything."""
    # The interpreter sorts slowly.
    monkeypatch.setattr(candidates, "CHUNK", 8)
    monkeypatch.setattr(candidates, "CHUNKS", 4)
    logits, canaries = tied(count, width, dtype), Canaries()
    values = canaries.around(torch.zeros(count, k, device=DEVICE).to(dtype))
    columns = canaries.around(torch.zeros(count, k, dtype=torch.int64, device=DEVICE))
    with counted_bytes() as bytes_:
        candidates.candidates(values, columns, logits)
    size = logits.element_size()
    moved = candidates.chunk_traffic(count, width, size)
    # Of a chunk that is cut off, it depends on the logits.
    if width % 8 == 0 or width <= 8 * candidates.top(k):
        bytes_.check(moved + candidates.traffic(count, width, k, size))
    # On the CPU: a sort on CUDA puts NaN before -NaN, or after it.
    logits = logits.cpu()
    expected = logits.sort(dim=-1, descending=True, stable=True)
    for got in ((values.cpu(), columns.cpu()), TorchOps().candidates(logits, k)):
        assert torch.equal(got[1], expected.indices[:, :k])
        assert torch.equal(got[0].nan_to_num(3e4), expected.values[:, :k].nan_to_num(3e4))
    assert canaries.are_alive()


def test_a_draft_has_no_more_candidates_than_the_kernel_takes() -> None:
    """Torch's would sort them from a copy of all logits, for which no memory is reserved."""

    def row_values(top_k: int) -> int:
        own = with_own(selector_rank=8, selector_top_k=top_k)
        return DraftConfig.from_dict(raw_config(vocab_size=300, **own)).head.row_values

    logits = some(2, 300)
    assert row_values(64) == 65 * 8
    assert TritonOps().candidates(logits, 64)[0].shape == (2, 64)
    with refused("dflash_config.selector_top_k in the draft's config.json", 65, reason="64"):
        row_values(65)
    with pytest.raises(ValueError, match="at most 64"):
        TritonOps().candidates(logits, 65)


@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noise"])
@pytest.mark.parametrize(
    ("requests", "drafts", "k", "rank"),
    [(5, 3, 4, 8), (2, 7, 5, 33), (1, 1, 1, 16), (0, 3, 4, 8), (5, 3, 16, 0)],
)
@DTYPES
def test_walk(
    dtype: torch.dtype, requests: int, drafts: int, k: int, rank: int, noisy: bool
) -> None:
    """The same tokens: scores are far apart, beside roundings."""
    vocabulary, canaries = 90, Canaries()
    tables = [some(vocabulary, rank, dtype=dtype) for _ in range(2)]
    logits, hidden = some(requests, drafts, k), some(requests, drafts, rank, dtype=dtype)
    ids = torch.rand(requests, drafts, vocabulary, device=DEVICE).topk(k).indices
    if requests > 2:
        logits[1, 1, 2] = torch.nan
        logits[2, 0] = -torch.inf
    bonus = torch.randint(0, vocabulary, (requests,), device=DEVICE)
    # Seeds of 64 bits, one of them negative; a greedy request among them.
    seeds = torch.tensor([2**40 + 5, -3, 7, 0, 2**63 - 1], device=DEVICE)[:requests]
    temperatures = torch.tensor([0.7, 3.0, 0.0, 1.0, 1.3], device=DEVICE)[:requests]
    seq_lens = torch.randint(0, 2**20, (requests,), device=DEVICE)
    noise = BlockNoise(seeds, temperatures, seq_lens) if noisy else None
    given = (logits, ids, bonus, Edges(hidden, *tables) if rank else None)
    expected, scores = TorchOps().walk(*given, noise)
    out = canaries.around(torch.full_like(expected, 7))
    drawn_by = None if scores is None else canaries.around(torch.full_like(scores, 7))
    with counted_bytes() as bytes_:
        walk.walk(out, drawn_by, *given, noise)
    bytes_.check(walk.traffic(requests, drafts, k, rank, hidden.element_size(), noise=noisy))
    assert torch.equal(out, expected)
    if drawn_by is not None and scores is not None:
        # Of what follows a token that is none, there is no meaning.
        drawn_by[1:3], scores[1:3] = 0, 0
        torch.testing.assert_close(drawn_by, scores, atol=1e-3, rtol=1e-5)
    assert canaries.are_alive()
    if requests > 2:
        likeliest = expected[0] if noisy else expected
        assert likeliest[1, 1] == -1 and likeliest[2, 0] == -1 and likeliest[0, 0] >= 0
        assert not noisy or not torch.equal(expected[0], expected[1])


def test_noise_of_the_walk_is_that_of_the_drafts() -> None:
    """The token with the most noise wins among equal scores: over many seeds and tokens, a wrong
    bit would show."""
    count, k = 40, 64
    zeros = torch.zeros(count, 2, 8, device=DEVICE)
    ids = torch.randint(0, 200000, (count, 2, k), device=DEVICE)
    table = torch.zeros(200000, 8, device=DEVICE)
    seeds = torch.randint(-(2**62), 2**62, (count,), device=DEVICE)
    ones, positions = torch.ones(count, device=DEVICE), torch.arange(count, device=DEVICE) * 7919
    noise = BlockNoise(seeds, ones, positions)
    logits, bonus = torch.zeros(count, 2, k, device=DEVICE), torch.zeros_like(seeds)
    found = TritonOps().walk(logits, ids, bonus, Edges(zeros, table, table), noise)[0][SAMPLED]
    best = noise.scores(logits, ids).argmax(-1, keepdim=True)
    assert torch.equal(found, ids.gather(-1, best)[..., 0])


def test_candidates_of_several_ranks_are_walked() -> None:
    """The kernel reads the candidates that a gather of ranks leaves."""
    requests, drafts, k = 3, 2, 4
    parts = torch.rand(2, requests * drafts, 90, device=DEVICE).topk(k)
    ranks = iter((parts.values, parts.indices.float()))
    tp = TensorParallel(0, 2, all_gather=lambda _: torch.stack(tuple(ranks), 1))
    values, ids = candidates_of_ranks(parts.values[0], parts.indices[0], tp)
    seeds = torch.arange(requests, device=DEVICE)
    noise = BlockNoise(seeds, torch.ones(requests, device=DEVICE), seeds)
    given = values.view(requests, drafts, k), ids.view(requests, drafts, k), seeds, None, noise
    for found, expected in zip(TritonOps().walk(*given), TorchOps().walk(*given), strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="logits: strides"):
        TritonOps().walk(given[0].transpose(0, 1), *given[1:])
