"""The verify width where little can be measured, where requests are short, and where they end."""

from __future__ import annotations

from collections import Counter

import pytest

from sglang_dflash.drafting.width import AdaptiveWidth
from tests.drafting.test_width import COST, WIDTHS, simulate


@pytest.mark.parametrize("known", [0, 3, 8, 30])
def test_steps_that_cannot_be_timed_are_as_with_a_fixed_width(known: int) -> None:
    """With short answers a prefill follows every step, which then has no duration."""
    policy = AdaptiveWidth(WIDTHS)
    _, widths = simulate(policy, lambda *_: 0.9, 600, is_timed=lambda step: step < known)
    # Drafts are good, and nothing else was measured in the end.
    assert Counter(widths[100:])[8] > 450


def test_what_could_not_be_timed_is_measured_later() -> None:
    policy = AdaptiveWidth(WIDTHS)
    _, widths = simulate(policy, lambda *_: 0.1, 1500, is_timed=lambda step: step >= 500)
    assert set(widths[100:500]) == {8}
    assert Counter(widths[600:])[1] > 850


def test_a_probe_that_was_cheap_is_not_repeated_for_ever() -> None:
    """One step of width 8 takes less than expected, and no later one can be timed."""
    policy, names = AdaptiveWidth(WIDTHS), ["a"]
    simulate(policy, lambda *_: 0.05, 1000)
    assert not policy.drafts
    policy.took(COST[8] / 4 / 1e3, 1, 500, 8)
    widths = []
    for _ in range(1000):
        widths.append(policy.choose(names, 500, 10**6))
        policy.observe(names, widths[-1], [0])
    assert 0 < Counter(widths)[8] < 40


def test_drafting_is_given_up_after_a_second_look_after_an_old_change_of_costs() -> None:
    """The change was one of an hour ago, while drafts paid."""

    def cost(step: int, width: int) -> float:
        return (2 if step >= 400 else 1) * COST[width]

    policy = AdaptiveWidth(WIDTHS)
    simulate(policy, lambda *_: 0.95, 800, cost=cost, noise=0)
    assert policy.drafts
    names, probes = ["r0"], policy.report()["width_probes"]
    while policy.drafts:
        width = policy.choose(names, 500, 10**6)
        policy.took(2 * COST[width] / 1e3, 1, 500, width)
        policy.observe(names, width, [0])
    assert policy.report()["width_probes"] == probes + 1


def test_requests_that_end_under_overlap_are_not_expected_to_accept() -> None:
    """Of four requests two have ended when the outcome arrives."""
    policy = AdaptiveWidth(WIDTHS)
    names = ["r0", "r1", "r2", "r3"]
    simulate(policy, lambda *_: 0.9, 200, requests=4)
    before = policy.report()
    for _ in range(100):
        width = policy.choose(names, 500, 10**6)
        policy.took(COST[width] / 1e3, 4, 500, width)
        # As many as a draft that is accepted 9 times of 10 gives.
        policy.observe(names[:2], width, [min(5, width - 1)] * 2)
    after = policy.report()
    expected = after["width_drafts_expected"] - before["width_drafts_expected"]
    accepted = after["width_drafts_accepted"] - before["width_drafts_accepted"]
    assert expected == pytest.approx(accepted, rel=0.15)


@pytest.mark.parametrize(("p", "width"), [(0.05, 1), (0.95, 4)])
def test_requests_that_are_all_shorter_than_a_block(p: float, width: int) -> None:
    policy = AdaptiveWidth(WIDTHS)
    _, widths = simulate(policy, lambda *_: p, 600, most=6)
    assert Counter(widths)[width] > 500 and set(widths) == {1, 4}
    if width == 1:
        assert policy.report()["width_now"] == 1 and not policy.drafts
        assert 0 < policy.report()["width_probe_share"] < 0.03


def test_drafting_that_costs_nothing_needs_no_decision_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a step may take as long with drafts as without."""
    policy, decisions = AdaptiveWidth(WIDTHS), []
    simulate(policy, lambda *_: 0.5, 300, cost=dict.fromkeys(WIDTHS, 8.0), noise=0)
    decide = policy._decide
    monkeypatch.setattr(policy, "_decide", lambda *given: decisions.append(given) or decide(*given))
    for _ in range(120):
        width = policy.choose(["r0"], 500, 10**6)
        policy.took(8.0 / 1e3, 1, 500, width)
        policy.observe(["r0"], width, [0])
    assert len(decisions) < 30
