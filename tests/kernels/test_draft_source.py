"""The choice between drafts and looked-up drafts, and what is learned of it: kernels and twins."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import draft_source
from dflash_kernels.draft_ops import TritonOps

from sglang_dflash.drafting.acceptance import Accepted, accept
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.draft_source import CLASSES, DRAFT, DraftsBySource, DraftSource
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.text_match import LONGEST_MATCH
from tests.kernels.support import DEVICE, Canaries, counted_bytes

VOCAB = 5
# R, B, W, and columns of the draft's block, which may be wider or narrower than a step.
CASES = {
    "none": (0, 8, 8, 8),
    "one-draft": (3, 2, 2, 2),
    "whole": (40, 8, 8, 8),
    "narrow": (17, 16, 3, 16),
    "long": (48, 32, 32, 8),
}
STEPS = pytest.mark.parametrize(("requests", "most", "width", "drafted"), CASES.values(), ids=CASES)


def sources(most: int) -> tuple[DraftSource, DraftSource]:
    """Return two of the same totals, of steps in which either source was the better one."""
    torch.manual_seed(most)
    source, twin = (DraftSource(most, VOCAB, DraftCounters(DEVICE)) for _ in range(2))
    reached = torch.randint(1, 300, source.totals.shape[1:], device=DEVICE).float()
    totals = torch.stack((reached, reached * torch.rand_like(reached).sqrt()))
    totals[:, DRAFT, 3] = 0  # of a class that no step has had
    for made in (source, twin):
        made.totals.copy_(totals)
    return source, twin


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape, device=DEVICE)


@STEPS
def test_the_kernel_chooses_as_its_twin(requests: int, most: int, width: int, drafted: int) -> None:
    source, twin = sources(most)
    block = tokens(requests, drafted)
    lengths = torch.arange(requests, device=DEVICE) % (LONGEST_MATCH + 1)
    # Some ids are of images, or of places outside of the text.
    followed = torch.randint(-2, VOCAB + 2, (requests, most - 1), device=DEVICE)
    likeliest, canaries = tokens(requests, drafted), Canaries()
    # A match of any length begins as the draft does, and unlike it.
    likeliest[::2, 1] = followed[::2, 0]
    followed[1::2, 0] = (likeliest[1::2, 1] + 1) % VOCAB
    given = [canaries.around(x) for x in (block, likeliest, lengths, followed)]
    with counted_bytes() as counted:
        got, by_source = TritonOps().choose_source(source, *given, width=width)
    counted.check(draft_source.choose_traffic(requests, width, drafted))
    expected, of_twin = TorchOps().choose_source(twin, block, likeliest, lengths, followed, width)
    assert torch.equal(got, expected) and all(map(torch.equal, by_source, of_twin))
    assert canaries.are_alive() and torch.equal(source.totals, twin.totals)
    if requests > LONGEST_MATCH:
        assert set(by_source.looks_up.tolist()) == {True, False}
    if requests > 2 * LONGEST_MATCH:
        assert set(by_source.classes.tolist()) == set(range(CLASSES))


@STEPS
def test_the_kernel_learns_as_its_twin(requests: int, most: int, width: int, drafted: int) -> None:
    """Several steps, some of whose blocks are accepted whole, and some not at all."""
    del drafted
    source, twin = sources(most)
    for step in range(3):
        # Few different tokens, so that every length occurs.
        target = torch.randint(2, (requests, most + 3), device=DEVICE)[:, :width]
        drafts = torch.randint(2, (2, requests, width - 1), device=DEVICE)
        if requests:
            drafts[step % 2, 0] = target[0, :-1]
        looks_up = torch.rand(requests, device=DEVICE) < 0.5
        chosen = drafts[1].where(looks_up[:, None], drafts[0])
        accepted = accept(torch.cat((target[:, :1], chosen), 1), target)
        classes = torch.randint(CLASSES, (requests,), device=DEVICE)
        by_source = DraftsBySource(drafts, classes, looks_up)
        with counted_bytes() as counted:
            TritonOps().learn_source(source, by_source, accepted)
        if requests:
            counted.check(draft_source.learn_traffic(requests, width - 1))
        TorchOps().learn_source(twin, by_source, accepted)
        torch.testing.assert_close(source.totals, twin.totals, rtol=1e-6, atol=0)
        assert torch.equal(source.counts, twin.counts)
    assert int(source.counts[:, 0].sum()) == 3 * requests


def test_a_choice_and_its_outcome_are_what_the_kernels_leave_alone() -> None:
    """Outside of a narrow step nothing is learned; what a choice was made from stays."""
    source, before = sources(8)
    block, lengths = tokens(4, 8), torch.full((4,), 9, device=DEVICE)
    _, by_source = TritonOps().choose_source(source, block, block, lengths, tokens(4, 7), 3)
    copies = [x.clone() for x in by_source]
    target = tokens(4, 3)
    outcome = Accepted(torch.full((4,), 2, device=DEVICE), target, target[:, 1])
    TritonOps().learn_source(source, by_source, outcome)
    assert all(map(torch.equal, by_source, copies))
    assert torch.equal(source.totals[..., 2:], before.totals[..., 2:])
    assert not torch.equal(source.totals[..., :2], before.totals[..., :2])
