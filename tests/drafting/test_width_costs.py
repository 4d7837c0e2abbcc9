"""What steps are expected to cost, from measured ones."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dflash.drafting.width.costs import (
    COLD,
    ENOUGH,
    SETTLED,
    SURPRISES,
    Place,
    StepCosts,
    place_of,
)

WIDTHS = (1, 4, 8)
SECONDS = {1: 0.01, 4: 0.02, 8: 0.03}


def measured(*order: int) -> tuple[StepCosts, Place]:
    """Costs of one place, in which each width was measured 20 times, in that order."""
    costs, place = StepCosts(WIDTHS), Place(1, 0)
    for width in order:
        for _ in range(20):
            costs.record(place, width, SECONDS[width])
    return costs, place


def test_places_are_buckets() -> None:
    assert [place_of(n, 1).requests for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 48,
    ]  # fmt: skip
    assert [place_of(1, n).context for n in (0, 1, 1024, 1025, 2048, 5000)] == [0, 0, 0, 1, 1, 3]


def test_an_outlier_is_no_cost_and_a_change_is_one() -> None:
    costs, place = StepCosts((1, 8)), Place(1, 0)
    for _ in range(50):
        costs.record(place, 1, 0.01)
        costs.record(place, 8, 0.02)
    costs.record(place, 8, 5.0)
    low, high = costs.seconds(place)
    assert high / low < 2.6
    for _ in range(100):
        costs.record(place, 8, 0.04)
        costs.record(place, 1, 0.01)
    low, high = costs.seconds(place)
    assert high / low == pytest.approx(4, rel=0.05) and high == pytest.approx(0.04, rel=0.1)


def test_a_change_of_drafting_is_one_of_all_drafts_and_plain_decoding_is_measured() -> None:
    costs, place = measured(1, 4, 8)
    changed = [costs.record(place, 8, 0.09) for _ in range(SURPRISES)]
    assert changed == [False] * (SURPRISES - 1) + [True]
    for _ in range(ENOUGH):
        assert costs.to_measure(place, WIDTHS) == 1
        costs.record(place, 1, 0.01)
    assert costs.to_measure(place, WIDTHS) == 8
    costs.record(place, 8, 0.09)
    # To measure the other width would cost more than it tells.
    assert costs.to_measure(place, WIDTHS) is None
    assert costs.seconds(place) == pytest.approx([0.01, 0.06, 0.09], rel=0.15)


def test_a_width_that_was_measured_wrongly_does_not_change_the_others() -> None:
    """It is measured again when it is stale, and no other meanwhile."""
    costs, place = measured(1, 8, 4)
    costs.record(place, 1, 0.01)
    assert [costs.record(place, 8, 0.06) for _ in range(SURPRISES)][-1]
    assert costs.seconds(place) == pytest.approx([0.01, 0.02, 0.06], rel=0.2)
    assert costs.to_measure(place, WIDTHS) is None


def test_slow_steps_in_a_row_are_no_lasting_change() -> None:
    costs, place = measured(1, 4, 8)
    for _ in range(SURPRISES):
        costs.record(place, 8, 0.06)
    while (width := costs.to_measure(place, WIDTHS)) is not None:
        costs.record(place, width, SECONDS[width])
    plain, _, block = costs.seconds(place)
    assert block / plain == pytest.approx(3, rel=0.05)


def test_costs_of_a_far_off_place_are_not_taken_over() -> None:
    """A server's first request comes alone, and then many at a time."""
    costs = StepCosts(WIDTHS)
    for _ in range(COLD + ENOUGH):
        costs.record(Place(1, 0), 1, 0.004)
    many = Place(16, 0)
    for width, seconds in ((1, 0.012), (4, 0.03), (8, 0.04)):
        for _ in range(ENOUGH):
            assert costs.to_measure(many, WIDTHS) == width
            costs.record(many, width, seconds)
    assert costs.seconds(many) == pytest.approx([0.012, 0.03, 0.04], rel=0.1)
    assert not np.isnan(costs.seconds(Place(1, 0))).any()


def test_drafts_are_measured_anew_if_plain_decoding_has_changed() -> None:
    costs, place = measured(4, 8, 1)
    assert [costs.record(place, 1, 0.02) for _ in range(SURPRISES)][-1]
    assert costs.seconds(place) == pytest.approx([0.02, 0.04, 0.06], rel=0.15)
    assert costs.to_measure(place, WIDTHS) == 4


def test_a_surprise_of_one_width_is_none_of_those_measured_meanwhile() -> None:
    costs, place = measured(1, 4, 8)
    wanted = []
    for _ in range(SURPRISES):
        costs.record(place, 1, 0.005)
        wanted.append(costs.to_measure(place, WIDTHS))
        costs.record(place, 8, 0.03)
    # Until it is known whether that is a change.
    assert wanted == [1] * (SURPRISES - 1) + [None]
    assert costs.seconds(place)[::2] == pytest.approx([0.005, 0.03], rel=0.1)


def test_a_slower_machine_is_slower_at_every_width() -> None:
    """Widths that are not in use are not taken for cheap."""
    costs, place = StepCosts((1, 8)), Place(1, 0)
    for _ in range(30):
        costs.record(place, 8, 0.02)
        costs.record(place, 1, 0.01)
    for _ in range(60):
        costs.record(place, 1, 0.015)
    low, high = costs.seconds(place)
    assert high / low > 1.7


def test_unknown_costs_are_guessed_in_proportion_and_measured_later() -> None:
    costs, known, new = StepCosts(WIDTHS), Place(4, 0), Place(8, 0)
    assert np.isnan(costs.seconds(known)).all()
    for _ in range(COLD):
        assert costs.to_measure(known, WIDTHS) == 1
        costs.record(known, 1, 0.5)
    for width, seconds in ((1, 0.01), (4, 0.02), (8, 0.03)):
        for _ in range(ENOUGH):
            assert costs.to_measure(known, WIDTHS) == width
            costs.record(known, width, seconds)
    assert costs.to_measure(known, WIDTHS) is None
    assert costs.seconds(new) == pytest.approx([0.01, 0.02, 0.03])
    for _ in range(SETTLED):
        assert costs.to_measure(new, WIDTHS) is None
        costs.record(new, 4, 0.04)
    assert costs.seconds(new) == pytest.approx([0.02, 0.04, 0.06], rel=0.05)
    assert costs.to_measure(new, WIDTHS) == 1
