"""Acceptance by its definition. That sampled outputs follow the target's law:
tests/serving/step/test_served_law.py."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.drafting.acceptance import accept, simulate_acceptance
from tests.target_law import target_probabilities


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
