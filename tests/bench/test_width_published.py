"""`python -m experiments width_published`: the arithmetic, and the committed result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments import width_published as published
from experiments.width_published import CONCURRENCY, FITTED, Task

RESULT = Path(__file__).parents[2] / "experiments/results/width_published.json"


@dataclass(frozen=True)
class Machine:
    """Known step costs in seconds by width, growing with the number of requests."""

    costs: dict[int, float]

    def task(self, rate: float) -> Task:
        speeds = {
            width: tuple(
                round(1e6 * c * published.geometric_tokens(rate, width) / (cost * (1 + c / 8)))
                for c in CONCURRENCY
            )
            for width, cost in self.costs.items()
        }
        lengths = [published.geometric_tokens(rate, width) for width in (8, 16)]
        return Task(speeds[1], speeds[8], speeds[16], *lengths)


def test_costs_and_rates_are_found_again() -> None:
    machine = Machine({1: 1.0, 8: 1.5, 16: 2.5})
    tasks = {name: machine.task(rate) for name, rate in zip(FITTED, (0.8, 0.9), strict=True)}
    tasks |= {"easy": machine.task(0.97), "hard": machine.task(0.6)}
    costs = published.step_costs(tasks, at=1)
    assert costs[8] / costs[1] == pytest.approx(1.5, rel=1e-4)
    assert costs[16] / costs[1] == pytest.approx(2.5, rel=1e-4)
    assert published.acceptance_rate(tasks["hard"]) == pytest.approx(0.6, abs=2e-4)
    for name, better in (("easy", 16), ("hard", 8)):
        row = published.predict(tasks, name, at=1)
        assert row["hit"] and row["better"] == better and row["lost_by_the_choice"] == 0
        for width in ("1", "8", "16"):
            assert row["predicted"][width] == pytest.approx(row["published"][width], rel=1e-3)
        assert row["adaptive"] == max(row["predicted"].values())


def test_geometric_tokens_are_the_sum_over_positions() -> None:
    assert published.geometric_tokens(0.7, 4) == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)


def test_the_committed_result_is_what_the_code_computes() -> None:
    rows = published.workload({}, published.NoOptions(), lambda *_: None)
    result = json.loads(RESULT.read_text())
    computed = published.report(rows, published.NoOptions())
    assert {key: result[key] for key in computed} == computed
