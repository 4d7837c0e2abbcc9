"""Accept rules: greedy by definition, sampled by a chi-square test against p_target."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sglang_dflash.drafting.acceptance import (
    accept,
    simulate_acceptance,
    target_probabilities,
)


def test_greedy_commits_the_agreeing_prefix_and_the_targets_next_token() -> None:
    block = torch.tensor([[9, 1, 2, 3], [9, 1, 5, 3], [9, 7, 2, 3], [9, 1, 2, 7]])
    tokens = torch.tensor([[1, 2, 3, 4]] * 4)
    accepted = accept(block, tokens)
    assert accepted.lengths.tolist() == [4, 2, 1, 3]
    assert accepted.bonus.tolist() == [4, 2, 1, 3]
    committed = [
        row[:n] for row, n in zip(accepted.tokens.tolist(), accepted.lengths.tolist(), strict=True)
    ]
    assert committed == [[1, 2, 3, 4], [1, 2], [1], [1, 2, 3]]


def sample(p_target: Tensor) -> Tensor:
    """A token per row of `[R, B, V]`: int64 `[R, B]`."""
    return torch.multinomial(p_target.flatten(0, -2), 1).view(p_target.shape[:-1])


@pytest.mark.parametrize("width", [1, 2, 6])
def test_greedy_equals_a_plain_loop_on_random_blocks(width: int) -> None:
    block, tokens = torch.randint(0, 3, (500, width)), torch.randint(0, 3, (500, width))
    accepted = accept(block, tokens)
    assert accepted.lengths.dtype == torch.int64 and accepted.tokens.equal(tokens)
    for r in range(500):
        n = 0
        while n < width - 1 and block[r, n + 1] == tokens[r, n]:
            n += 1
        assert accepted.lengths[r] == n + 1
        assert accepted.bonus[r] == tokens[r, n]


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("draft", ["likeliest", "unlikely"])
def test_sampled_output_is_distributed_as_the_target(how: dict, draft: str) -> None:
    """20,000 two-token outputs over a vocabulary of 8; the second token's law depends on the first.

    A wrong residual, or a draft accepted too often, shifts these counts by far more than chance. At
    a p-value of 1e-4 the test fails by accident once in 10,000 runs, and the seed is fixed.
    """
    vocabulary, draws = 8, 20_000
    first, second = torch.randn(vocabulary), torch.randn(vocabulary, vocabulary)
    p_first, p_second = target_probabilities(first, **how), target_probabilities(second, **how)
    drafted = int(
        p_first.argmax() if draft == "likeliest" else p_first.masked_fill(p_first == 0, 2).argmin()
    )
    # Position 1 has the target's law after the drafted token; a rejection begins the next block.
    p_target = torch.stack([p_first, p_second[drafted]]).expand(draws, -1, -1)
    block = torch.tensor([[0, drafted]]).expand(draws, -1)
    accepted = accept(block, sample(p_target))
    assert 0 < (accepted.lengths == 2).sum() <= draws
    one = accepted.tokens[:, 0]
    two = torch.where(
        accepted.lengths == 2, accepted.tokens[:, 1], sample(p_second[one][:, None])[:, 0]
    )
    counts = torch.bincount(one * vocabulary + two, minlength=vocabulary**2).double()
    expected = (p_first[:, None] * p_second).flatten().double() * draws
    assert counts[expected == 0].sum() == 0
    # Cells with few expected draws are pooled, as the test's approximation asks for.
    rare = expected < 5
    pooled = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    if pooled[1][-1] == 0:
        pooled = [x[:-1] for x in pooled]
    assert chisquare(pooled[0], pooled[1] * (pooled[0].sum() / pooled[1].sum())).pvalue > 1e-4


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (target_probabilities(logits, top_k=2) > 0).tolist() == [True, True, False, False]
    assert (target_probabilities(logits, top_p=0.79) > 0).tolist() == [True, True, False, False]
    assert (target_probabilities(logits, min_p=0.2) > 0).tolist() == [True, True, True, False]
    torch.testing.assert_close(
        target_probabilities(logits, top_k=2), torch.tensor([0.625, 0.375, 0, 0])
    )


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_simulated_acceptance_commits_what_it_is_told(length: int) -> None:
    block, tokens = (
        torch.tensor([[9, 1, 2, 3], [9, -1, -1, -1]]),
        torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]),
    )
    simulated = simulate_acceptance(block, tokens, length)
    # Drafts, then the target's own; where nothing was drafted the target's own only.
    expected = [[*[1, 2, 3][: length - 1], [5, 6, 7, 8][length - 1]], [5]]
    assert simulated.lengths.tolist() == [length, 1]
    assert [simulated.tokens[0, :length].tolist(), simulated.tokens[1, :1].tolist()] == expected
    assert simulated.bonus.tolist() == [row[-1] for row in expected]
    filled = simulate_acceptance(block, tokens, length, filler=100)
    assert (
        set(filled.tokens[:, :length].flatten().tolist()) == {100}
        and filled.bonus.tolist() == [100] * 2
    )
