"""The choice between the draft's and looked-up drafts, against estimates by loops over lists."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted, accept
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.draft_source import (
    CLASSES,
    DRAFT,
    LOOKUP,
    DraftsBySource,
    DraftSource,
    learn_source,
)
from sglang_dflash.drafting.text_match import LONGEST_MATCH

BLOCK = 6


def verified(blocks: list[list[int]], texts: list[list[int]]) -> Accepted:
    """The outcome of a step with these drafts, where the target writes these tokens."""
    drafts, tokens = torch.tensor(blocks), torch.tensor(texts)
    block = torch.cat((torch.zeros(len(blocks), 1, dtype=torch.int64), drafts), 1)
    # After a wrong draft the target's tokens have no meaning.
    return accept(block, torch.cat((tokens, tokens[:, -1:]), 1))


def fresh() -> DraftSource:
    return DraftSource(BLOCK, 100, DraftCounters("cpu"))


def learn(source: DraftSource, classes: Tensor, tokens: Tensor, accepted: Accepted) -> None:
    """Let it take in a step with these drafts of both sources."""
    looks_up = torch.zeros_like(classes, dtype=torch.bool)
    learn_source(source, DraftsBySource(tokens, classes, looks_up), accepted)


def poor_draft() -> DraftSource:
    """Return a source whose draft was wrong in a few steps without a match."""
    source = fresh()
    drafts = torch.zeros(2, 1, 5, dtype=torch.int64)
    for _ in range(3):
        learn(source, torch.tensor([0]), drafts, verified([[0] * 5], [[9] * 5]))
    return source


@pytest.mark.parametrize("length", range(LONGEST_MATCH + 1))
def test_a_long_match_is_taken_before_its_class_is_known(length: int) -> None:
    """A server begins with the draft. Where that is poor, a match of three tokens or more is taken,
    and one of two if the drafts begin alike."""
    source = poor_draft()
    drafted = torch.tensor([[1, 2], [1, 2]])
    seen = torch.tensor([[1, 3], [4, 2]])
    begin_alike = drafted[:, 0] == seen[:, 0]
    classes = source.classes(torch.tensor([length, length]), begin_alike)
    assert int(classes.max()) < CLASSES
    taken = source.prefers_lookup(classes, drafts=5).tolist()
    assert taken == [length >= 2, length >= 3]
    assert not fresh().prefers_lookup(classes, drafts=5).any()


def test_both_sources_are_judged_by_one_step() -> None:
    """The draft is right in one place more than what was looked up, and verified: both are known.
    Of what no step reached nothing is."""
    source = fresh()
    before = source.expected(5)
    text = [7, 8, 9, 10, 11]
    drafted, seen = [7, 8, 0, 10, 11], [7, 0, 9, 10, 11]
    classes = torch.tensor([4])
    learn(source, classes, torch.tensor([[drafted], [seen]]), verified([drafted], [text]))
    reached, right = source.totals[:, :, 4]
    assert reached[DRAFT].tolist() == [1, 1, 1, 0, 0] and right[DRAFT].tolist() == [1, 1, 0, 0, 0]
    assert (reached[LOOKUP] - 3).gt(0).tolist() == [True, True, False, False, False]
    others = [i for i in range(CLASSES) if i != 4]
    assert torch.equal(source.expected(5)[LOOKUP, others], before[LOOKUP, others])


def test_a_good_draft_is_known_before_a_class_is_seen() -> None:
    """Its drafts in steps without a match count where there is one."""
    source, unseen = poor_draft(), torch.tensor([7])
    assert source.prefers_lookup(unseen, 5).tolist() == [True]
    drafts = torch.tensor([[[1, 2, 3, 4, 5]], [[0, 0, 0, 0, 0]]])
    for _ in range(20):
        learn(source, torch.tensor([0]), drafts, verified([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]]))
    assert source.prefers_lookup(unseen, 5).tolist() == [False]


def test_the_better_source_is_found_whichever_is_verified() -> None:
    """Per class: the draft is right with one probability in every place, lookup with another."""
    rng, steps = random.Random(3), 3000
    chances = {2: (0.9, 0.5), 5: (0.4, 0.8), 6: (0.85, 0.8)}
    for always in (DRAFT, LOOKUP, None):
        source = fresh()
        for _ in range(steps):
            classes = torch.tensor(list(chances))
            text = [[rng.randrange(9) for _ in range(5)] for _ in chances]
            pairs = [
                [
                    [t if rng.random() < p else 99 for t in row]
                    for row, p in zip(text, ps, strict=True)
                ]
                for ps in zip(*chances.values(), strict=True)
            ]
            taken = source.prefers_lookup(classes, 5).tolist()
            which = [int(t) if always is None else always for t in taken]
            blocks = [pairs[w][row] for row, w in enumerate(which)]
            learn(source, classes, torch.tensor(pairs), verified(blocks, text))
        expected = source.expected(5)
        for name, both in chances.items():
            for of, chance in enumerate(both):
                length = sum(chance ** (k + 1) for k in range(5))
                assert math.isclose(expected[of, name].item(), length, rel_tol=0.25), (always, of)
        assert source.prefers_lookup(torch.tensor(list(chances)), 5).tolist() == [
            False, True, False,
        ]  # fmt: skip


def test_a_narrow_step_counts_its_own_positions() -> None:
    """Lookup is better in the first place, the draft over all."""
    source = fresh()
    classes = torch.tensor([3])
    for i in range(400):
        text = [[1, 2, 3, 4, 5]]
        drafted = [[1, 2, 3, 4, 5] if i % 4 else [0, 2, 3, 4, 5]]
        seen = [[1, 0, 0, 0, 0]]
        learn(source, classes, torch.tensor([drafted, seen]), verified(drafted, text))
    assert source.prefers_lookup(classes, 1).tolist() == [True]
    assert source.prefers_lookup(classes, 5).tolist() == [False]


def test_what_no_step_reaches_for_long_stays_known() -> None:
    """Nothing decays to 0 / 0."""
    source = fresh()
    for _ in range(20_000):
        learn(
            source,
            torch.tensor([1]),
            torch.zeros(2, 1, 5, dtype=torch.int64),
            verified([[0] * 5], [[9] * 5]),
        )
    assert source.expected(5).isfinite().all()
    assert source.prefers_lookup(torch.tensor([5]), 5).tolist() == [True]
