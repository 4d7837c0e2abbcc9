"""What is expected of drafts, from outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dflash.drafting.width.survival import MOST_REQUESTS, Survival


def test_what_comes_after_a_rejection_counts_nowhere() -> None:
    survival = Survival(7)
    rows = survival.rows(["a"])
    before = survival.acceptance(rows)[0]
    for _ in range(200):
        survival.observe(["a"], 7, [2])
    after = survival.acceptance(survival.rows(["a"]))[0]
    assert (after[:2] > 0.95).all() and after[2] < 0.1
    # Never tried: what is known of all requests.
    assert (after[3:] > 0.3).all() and (after[3:] < before[3:] + 0.01).all()


def test_expected_tokens_are_calibrated() -> None:
    rng, survival, p = np.random.default_rng(1), Survival(7), np.linspace(0.9, 0.5, 7)
    for _ in range(400):
        rejected = rng.random((2, 7)) >= p
        accepted = np.where(rejected.any(1), rejected.argmax(1), 7)
        survival.observe(["a", "b"], 7, accepted.tolist())
    expected = 1 + np.concatenate(([0], p.cumprod().cumsum()))
    assert np.abs(survival.tokens(survival.rows(["a", "b"])).mean(0) - expected).max() < 0.35


def test_requests_are_told_apart() -> None:
    survival = Survival(7)
    for _ in range(20):
        survival.observe(["good", "bad"], 7, [7, 0])
    good, bad = survival.tokens(survival.rows(["good", "bad"]))[:, -1]
    assert good > 6 and bad < 1.5


@pytest.mark.parametrize("drafts", [0, 3, 7])
def test_steps_are_the_same_taken_in_together_or_one_by_one(drafts: int) -> None:
    rng, requests = np.random.default_rng(2), ["a", "b"]
    together, single = Survival(7), Survival(7)
    for survival in (together, single):
        survival.observe(requests, 7, [3, 1])
        survival.rows(requests)
    # Few enough that nothing counts as a change of text.
    for _ in range(4):
        accepted = rng.integers(1, 3, 2).tolist() if drafts else []
        together.observe(requests, drafts, accepted)
        single.observe(requests, drafts, accepted)
        single.rows(requests)
    for names in (["new"], requests):
        # Positions that were not reached count as expected, which changes from step to step.
        np.testing.assert_allclose(
            together.acceptance(together.rows(names)),
            single.acceptance(single.rows(names)),
            rtol=0.07 if drafts else 1e-7,
        )
    np.testing.assert_allclose(together._counts, single._counts)
    np.testing.assert_allclose(together._all_lately, single._all_lately)


def test_a_new_request_is_expected_to_be_as_all_are_now() -> None:
    """Also at positions that its kind of text never reaches."""
    survival = Survival(7)
    for i in range(200):
        survival.observe([f"easy {i % 20}"], 7, [7])
    for i in range(60):
        survival.observe([f"hard {i}"], 7, [int(i % 5 == 0)])
        # After one draft that happens to be accepted, too.
        survival.observe([f"hard {i}"], 7, [0])
    survival.observe(["lucky"], 7, [1])
    new, lucky = survival.tokens(survival.rows(["new", "lucky"]))[:, -1]
    assert new < 1.6 and lucky < 1.9


@pytest.mark.parametrize("differ", [False, True])
def test_few_steps_tell_much_if_requests_differ(differ: bool) -> None:
    rng, survival = np.random.default_rng(3), Survival(7)
    for i in range(400):
        request = i % 20
        p = (0.95 if request % 2 else 0.1) if differ else 0.6
        survival.observe([f"r{request}"], 7, [min(int(rng.geometric(1 - p)) - 1, 7)])
    for _ in range(3):
        survival.observe(["unlucky"], 7, [0])
    # Second drafts: the request's level, without what is known of the first.
    new, unlucky = survival.acceptance(survival.rows(["new", "unlucky"]))[:, 1]
    assert 0.4 < new < 0.8 and (unlucky < 0.8 * new) == differ


def test_requests_of_long_ago_are_forgotten() -> None:
    survival = Survival(3)
    for _ in range(30):
        survival.observe(["kept"], 3, [0])
    survival.rows([f"r{i}" for i in range(MOST_REQUESTS - 1)])
    before = survival.acceptance(survival.rows(["kept"]))
    rows = survival.rows(["kept", "new"])
    assert rows.tolist() == [0, 1]
    after = survival.acceptance(rows)
    assert np.allclose(after[:1], before) and (after[1] > after[0]).all()


def test_positions_that_are_never_reached_are_thought_of_as_the_others() -> None:
    """What was once known of them is gone after so many steps."""
    survival = Survival(7)
    for _ in range(5_000):
        survival.observe(["r"], 7, [0])
    assert survival.acceptance(survival.rows(["r", "new"])).max() < 0.05
