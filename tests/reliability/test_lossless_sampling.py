"""Sampled outputs have the target's distribution: a test with a stated power.

`POWER` is the probability that the test finds a distribution whose total variation distance from
the target's is `DISTANCE` or more; `LEVEL` that it fails by accident. By Cauchy and Schwarz such a
distribution makes the chi-square statistic noncentral by 4 N DISTANCE^2 or more over N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2, ncx2
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted, accept, sample, target_probabilities

VOCABULARY, TOKENS, BLOCK = 4, 3, 4
DRAWS = 200_000
LEVEL, DISTANCE, POWER = 1e-6, 0.015, 0.999
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.85},
    {"temperature": 1.0, "min_p": 0.15},
]
DRAFTS = ["the likeliest", "an unlikely one", "another model's"]

Rule = Callable[[Tensor, Tensor], Accepted]


def chain(draft: str, law: Tensor) -> Tensor:
    """The drafted token after each token `[V]`, of the target's law `[V, V]`."""
    if draft == "the likeliest":
        return law.argmax(1)
    if draft == "an unlikely one":
        return law.masked_fill(law == 0, 2).argmin(1)
    return torch.randint(0, VOCABULARY, (VOCABULARY,))


def outputs(law: Tensor, drafted: Tensor, rule: Rule) -> Tensor:
    """`DRAWS` outputs `[DRAWS, TOKENS]` after token 0, by verify steps of blocks of `BLOCK`."""
    written = torch.zeros(DRAWS, TOKENS + BLOCK, dtype=torch.int64)
    length, bonus = torch.zeros(DRAWS, dtype=torch.int64), torch.zeros(DRAWS, dtype=torch.int64)
    while (left := (length < TOKENS).nonzero()[:, 0]).numel():
        block = [bonus[left]]
        for _ in range(BLOCK - 1):
            block.append(drafted[block[-1]])
        stacked = torch.stack(block, 1)
        accepted = rule(stacked, sample(law[stacked]))
        # What is not committed is overwritten by the next step.
        places = length[left, None] + torch.arange(BLOCK)
        written[left[:, None], places.clamp(max=TOKENS + BLOCK - 1)] = accepted.tokens
        length[left] += accepted.lengths
        bonus[left] = accepted.bonus
    return written[:, :TOKENS]


def p_value(law: Tensor, drawn: Tensor) -> tuple[float, int]:
    """Of the chi-square test of all outputs against the law, and its degrees of freedom."""
    expected = law[0]
    for _ in range(TOKENS - 1):
        expected = (expected.view(-1, VOCABULARY, 1) * law).flatten()
    codes = (drawn * VOCABULARY ** torch.arange(TOKENS - 1, -1, -1)).sum(1)
    counts = torch.bincount(codes, minlength=VOCABULARY**TOKENS).double()
    if counts[expected == 0].sum():
        return 0.0, 1
    likely = expected.double() * DRAWS
    # Cells with few expected draws are pooled, as the test's approximation asks for.
    rare = likely < 10
    pairs = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, likely)]
    if pairs[1][-1] < 10:
        pairs = [x[:-1] for x in pairs]
    statistic = ((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum()
    freedom = len(pairs[0]) - 1
    return float(chi2.sf(float(statistic), freedom)), freedom


# Every setting with one kind of draft, the first with all.
CASES = [
    *((SETTINGS[0], draft) for draft in DRAFTS),
    *((how, DRAFTS[at % len(DRAFTS)]) for at, how in enumerate(SETTINGS[1:])),
]


@pytest.mark.parametrize(("how", "draft"), CASES, ids=str)
def test_the_outputs_are_the_targets(how: dict[str, float], draft: str) -> None:
    law = target_probabilities(torch.randn(VOCABULARY, VOCABULARY), **how)
    p, freedom = p_value(law, outputs(law, chain(draft, law), accept))
    assert p > LEVEL
    power = ncx2.sf(chi2.isf(LEVEL, freedom), freedom, 4 * DRAWS * DISTANCE**2)
    assert power > POWER


def wrong_residual(block: Tensor, target_tokens: Tensor) -> Accepted:
    """After a rejection, a token of the whole law in place of the residual: drawn a second time."""
    right = accept(block, target_tokens)
    redrawn = sample(LAW[block.gather(1, (right.lengths - 1)[:, None])])[:, 0]
    rejected = (right.lengths < BLOCK) & (torch.rand(len(block)) < 0.1)
    bonus = torch.where(rejected, redrawn, right.bonus)
    tokens = right.tokens.clone().scatter_(1, (right.lengths - 1)[:, None], bonus[:, None])
    return Accepted(right.lengths, tokens, bonus)


def accepts_too_often(block: Tensor, target_tokens: Tensor) -> Accepted:
    """One rejected draft in thirty is accepted."""
    forced = torch.rand(len(block), BLOCK - 1) < 1 / 30
    tokens = target_tokens.clone()
    tokens[:, :-1] = torch.where(forced, block[:, 1:], tokens[:, :-1])
    return accept(block, tokens)


LAW = target_probabilities(
    torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
)


@pytest.mark.parametrize("rule", [wrong_residual, accepts_too_often], ids=lambda r: r.__name__)
def test_a_wrong_rule_is_found(rule: Rule) -> None:
    assert p_value(LAW, outputs(LAW, chain("the likeliest", LAW), rule))[0] < LEVEL
