"""Sampled outputs have the target's distribution: a test with a stated power.

The target's token is the argmax of log p_target + Gumbel noise, as on a server, one seed per
output; coupled drafts use the same noise.

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

from sglang_dflash.drafting.acceptance import Accepted, accept, target_probabilities
from sglang_dflash.drafting.noise import gumbel

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
DRAFTS = ["the likeliest", "an unlikely one", "another model's", "coupled to another model's"]

# Blocks `[N, B]`, the target's tokens, its law after each token of the block `[N, B, V]` and the
# noise `[N, B, V]`.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Accepted]
# Law `[V, V]`, tokens `[N]` and the noise after them `[N, V]` to drafts `[N]`.
Draft = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def noise() -> Tensor:
    """Float32 `[DRAWS, TOKENS + BLOCK, VOCABULARY]`, by output, position and token."""
    seeds, positions = torch.arange(DRAWS), torch.arange(TOKENS + BLOCK)
    return gumbel(seeds[:, None, None], positions[:, None], torch.arange(VOCABULARY)).float()


def draft_of(kind: str) -> Draft:
    other = torch.randn(VOCABULARY, VOCABULARY)

    def draft(law: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        if kind == "the likeliest":
            return law.argmax(1)[tokens]
        if kind == "an unlikely one":
            return law.masked_fill(law == 0, 2).argmin(1)[tokens]
        # Of each token another one, of the whole vocabulary.
        scores = other[tokens]
        return (scores + noise if kind.startswith("coupled") else scores).argmax(1)

    return draft


def by_equality(block: Tensor, target_tokens: Tensor, _law: Tensor, _noise: Tensor) -> Accepted:
    return accept(block, target_tokens)


def outputs(law: Tensor, draft: Draft, noise: Tensor, rule: Rule = by_equality) -> Tensor:
    """`DRAWS` outputs `[DRAWS, TOKENS]` after token 0, by verify steps of blocks of `BLOCK`."""
    written = torch.zeros(DRAWS, TOKENS + BLOCK, dtype=torch.int64)
    length, bonus = torch.zeros(DRAWS, dtype=torch.int64), torch.zeros(DRAWS, dtype=torch.int64)
    while (left := (length < TOKENS).nonzero()[:, 0]).numel():
        # Of the tokens that follow the block's.
        places = length[left, None] + torch.arange(BLOCK)
        own = noise[left[:, None], places]
        block = [bonus[left]]
        for at in range(BLOCK - 1):
            block.append(draft(law, block[-1], own[:, at]))
        stacked = torch.stack(block, 1)
        after = law[stacked]
        accepted = rule(stacked, (after.log() + own).argmax(-1), after, own)
        # What is not committed is overwritten by the next step.
        written[left[:, None], places] = accepted.tokens
        length[left] += accepted.lengths
        bonus[left] = accepted.bonus
    return written[:, :TOKENS]


def p_value(law: Tensor, drawn: Tensor) -> tuple[float, int]:
    """Return the chi-square test's p-value for all outputs, and its degrees of freedom."""
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


# Every setting with coupled drafts, the first with all kinds.
CASES = [*((SETTINGS[0], draft) for draft in DRAFTS), *((how, DRAFTS[3]) for how in SETTINGS[1:])]


@pytest.mark.parametrize(("how", "draft"), CASES, ids=str)
def test_the_outputs_are_the_targets(how: dict[str, float], draft: str, noise: Tensor) -> None:
    law = target_probabilities(torch.randn(VOCABULARY, VOCABULARY), **how)
    p, freedom = p_value(law, outputs(law, draft_of(draft), noise))
    assert p > LEVEL
    power = ncx2.sf(chi2.isf(LEVEL, freedom), freedom, 4 * DRAWS * DISTANCE**2)
    assert power > POWER


def test_coupled_drafts_are_accepted_more_often(noise: Tensor) -> None:
    """A draft that is the target guesses all of it; otherwise the test above would see little."""

    def own(law: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        return (law[tokens].log() + noise).argmax(1)

    lengths: list[Tensor] = []

    def watched(*given: Tensor) -> Accepted:
        found = by_equality(*given)
        lengths.append(found.lengths)
        return found

    outputs(LAW, own, noise, watched)
    assert all((of == BLOCK).all() for of in lengths)


def test_noise_by_rank_keeps_the_law_and_couples_nothing(noise: Tensor) -> None:
    """The third wrong coupling: noise of a token's place in the order of probabilities. No test of
    the law can find it; drafts of the target itself, which noise by token guesses without fail, are
    accepted no more often than likeliest tokens are."""

    def accepted(draft: Draft, rule: Rule) -> tuple[float, float]:
        lengths: list[Tensor] = []

        def watched(*given: Tensor) -> Accepted:
            found = rule(*given)
            lengths.append(found.lengths)
            return found

        p, _ = p_value(LAW, outputs(LAW, draft, noise, watched))
        return p, torch.cat(lengths).double().mean().item()

    def own(law: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        return (law[tokens].log() + noise).argmax(1)

    p, coupled_length = accepted(own, noise_by_rank)
    _, likeliest_length = accepted(draft_of("the likeliest"), noise_by_rank)
    assert p > LEVEL
    assert coupled_length < 1.02 * likeliest_length < 0.8 * BLOCK


def redrawn(block: Tensor, target_tokens: Tensor, law: Tensor, noise: Tensor) -> Accepted:
    """Draw a rejected token again, from the whole law in place of the residual."""
    right = accept(block, target_tokens)
    at = (right.lengths - 1)[:, None]
    again = torch.multinomial(law.take_along_dim(at[..., None], 1)[:, 0], 1)[:, 0]
    rejected = (right.lengths < BLOCK) & (torch.rand(len(block)) < 0.1)
    return replaced(right, torch.where(rejected, again, right.bonus))


def accepts_too_often(block: Tensor, target_tokens: Tensor, *_: Tensor) -> Accepted:
    """One rejected draft in thirty is accepted."""
    forced = torch.rand(len(block), BLOCK - 1) < 1 / 30
    tokens = target_tokens.clone()
    tokens[:, :-1] = torch.where(forced, block[:, 1:], tokens[:, :-1])
    return accept(block, tokens)


def noise_of_one_position(block: Tensor, _: Tensor, law: Tensor, noise: Tensor) -> Accepted:
    """The noise of a block's first position is used at all of them."""
    return accept(block, (law.log() + noise[:, :1]).argmax(-1))


def noise_by_rank(block: Tensor, _: Tensor, law: Tensor, noise: Tensor) -> Accepted:
    """The noise of a token is that of its place among the tokens by probability."""
    ranks = law.argsort(-1, descending=True).argsort(-1)
    return accept(block, (law.log() + noise.gather(-1, ranks)).argmax(-1))


def shared_by_ratio(block: Tensor, _: Tensor, law: Tensor, noise: Tensor) -> Accepted:
    """Acceptance by p_target / p_draft, and the residual, with the noise that chose the draft."""
    q = OTHER.softmax(1)[block]
    drafted, p_law = block[:, 1:, None], law[:, :-1]
    ratio = (p_law.gather(2, drafted) / q[:, :-1].gather(2, drafted))[..., 0]
    agree = (torch.rand(ratio.shape) < ratio).long().cumprod(1)
    accepted = agree.sum(1)
    residual = ((law - q).clamp(min=0).log() + noise).argmax(-1)
    residual[:, -1] = (law[:, -1].log() + noise[:, -1]).argmax(-1)
    bonus = residual.gather(1, accepted[:, None])[:, 0]
    tokens = torch.cat((block[:, 1:], block[:, :1]), 1)
    return replaced(Accepted(accepted + 1, tokens, bonus), bonus)


def replaced(accepted: Accepted, bonus: Tensor) -> Accepted:
    """Return `accepted` with another bonus token."""
    tokens = accepted.tokens.scatter(1, (accepted.lengths - 1)[:, None], bonus[:, None])
    return Accepted(accepted.lengths, tokens, bonus)


_of_law, OTHER = torch.randn(2, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
LAW = target_probabilities(_of_law)


def coupled(_law: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
    return (OTHER[tokens] + noise).argmax(1)


@pytest.mark.parametrize(
    "rule",
    [redrawn, accepts_too_often, noise_of_one_position, shared_by_ratio],
    ids=lambda r: r.__name__,
)
def test_a_wrong_rule_is_found(rule: Rule, noise: Tensor) -> None:
    """Noise by rank is no such rule: its law is right, and what finds it is the test above of its
    acceptance, and for drafts and target `test_noise.py` and `test_seeded_sampling.py`, which
    compare with SGLang's noise and with answers beside others."""
    assert p_value(LAW, outputs(LAW, coupled, noise))[0] > LEVEL
    assert p_value(LAW, outputs(LAW, coupled, noise, rule))[0] < LEVEL
