"""Replays of recorded steps: predictions from confidence, and widths chosen with them."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.width_replay import (
    BEFORE,
    NOW,
    OUTCOMES,
    REFIT,
    CalibratedMap,
    Recorded,
    Replay,
    ragged,
    seconds_of,
    uniform,
)

DRAFTS = 7
# Each token of width costs as much as a tenth of the first.
COSTS = 1 + np.arange(DRAFTS + 1) / 10


def steps(requests: int = 1, informative: bool = True, count: int = 600) -> list[Recorded]:
    """Steps in which each draft has its own chance, which the drafter knows or not."""
    random, found = np.random.default_rng(0), []
    for _ in range(count):
        chance = random.choice([0.1, 0.95], size=(requests, DRAFTS))
        is_hit = random.random((requests, DRAFTS)) < chance
        accepted = is_hit.cumprod(1).sum(1).tolist()
        shown = chance if informative else random.permuted(chance, axis=None)
        found.append(Recorded([str(i) for i in range(requests)], accepted, shown.tolist()))
    return found


@pytest.mark.parametrize("requests", [1, 4])
def test_confidence_that_tells_predicts_and_gains(requests: int) -> None:
    result = Replay(COSTS, requests).run(steps(requests))
    losses = {name: of["log_loss"] for name, of in result["predictions"].items()}
    assert losses[NOW] < 0.75 * losses[OUTCOMES]
    # The next step has other chances.
    assert losses[BEFORE] > 0.95 * losses[OUTCOMES]
    speeds = result["speed_over_outcomes"]
    assert speeds["foresight"] > speeds[NOW] > 1.02
    assert speeds[f"{NOW}, ragged"] >= speeds[NOW]


def test_confidence_that_tells_nothing_is_worth_nothing() -> None:
    result = Replay(COSTS, 1).run(steps(informative=False))
    losses = {name: of["log_loss"] for name, of in result["predictions"].items()}
    assert losses[NOW] == pytest.approx(losses[OUTCOMES], rel=0.05)
    assert result["speed_over_outcomes"][NOW] == pytest.approx(1, abs=0.02)


def test_steps_with_fewer_requests_do_not_count() -> None:
    full = steps(4, count=300)
    fewer = [Recorded(*(column[:1] for column in step)) for step in steps(4, count=100)]
    speeds = Replay(COSTS, 4).run([*full, *fewer])["speed_over_outcomes"]
    assert speeds == Replay(COSTS, 4).run(full)["speed_over_outcomes"]


def test_the_map_leaves_out_drafts_after_a_rejected_one() -> None:
    fitted = CalibratedMap(DRAFTS, 1)
    sure, unsure = np.full((1, DRAFTS, 1), 3.0), np.full((1, DRAFTS, 1), -3.0)
    for i in range(REFIT):
        features = sure.copy()
        # Positions that are never reached say the opposite of what happens.
        features[:, 2:] = unsure[:, 2:]
        fitted.learn(features, np.array([1 if i % 4 else 0]))
    rates = fitted.acceptance(sure)[0]
    assert rates[0] == pytest.approx(0.75, abs=0.02)
    assert rates[1] < 0.1
    # Not tried: what the feature itself says.
    assert rates[5] > rates[1]


def test_the_map_begins_as_its_first_feature() -> None:
    features = np.zeros((2, DRAFTS, 2))
    features[..., 0] = np.log(0.8 / 0.2)
    features[..., 1] = 5
    np.testing.assert_allclose(CalibratedMap(DRAFTS, 2).acceptance(features), 0.8)


def test_uniform_and_ragged_widths() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.3, 0.05, 0.01]])
    costs = np.array([1, 1.2, 1.4, 1.6])
    # A second is worth a token per request: widening costs 0.4 tokens per step of two requests.
    assert uniform(survival, costs, 2.0).tolist() == [4, 4]
    # Each draft costs 0.2.
    assert ragged(survival, costs, 2.0).tolist() == [4, 2]
    assert uniform(survival, costs, 5.0).tolist() == [2, 2]
    assert ragged(survival, costs, 5.0).tolist() == [4, 1]


def test_a_drafted_step_never_costs_what_plain_decoding_does() -> None:
    costs = np.array([1, 3, 4, 5.0])
    assert seconds_of(1.25, costs) == 3
    assert seconds_of(2.5, costs) == 3.5
