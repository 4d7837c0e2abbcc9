"""The report of `python -m experiments width`."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy import stats

from experiments import width
from sglang_dflash.bench.datasets import Prompt
from sglang_dflash.bench.load import Answer, Pass
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.facts.errors import ConfigError


def passes(*seconds: float, ids: tuple[int, ...] = (1, 2, 3)) -> list[Pass]:
    answer = Answer("", ids, 3, 0.1, 0.12)
    return [Pass(s, [[answer]], VerifySteps(2, 5)) for s in seconds]


def measured(adaptive_ids: tuple[int, ...] = (1, 2, 3)) -> width.Measured:
    by_arm = {
        "plain": passes(2.0, 2.2, 1.9),
        "plain again": passes(2.1, 2.0, 2.0),
        "width 1": passes(2.0, 2.0, 2.0),
        "fixed 8": passes(1.0, 1.0, 1.0),
        "fixed 4": passes(0.8, 0.8, 0.8),
        "adaptive": passes(0.8, 0.9, 0.7, ids=adaptive_ids),
    }
    return width.Measured(by_arm, {"8": 5, "1": 2}, 0.25)


def test_ratios_are_of_the_same_round_with_a_lower_bound() -> None:
    logs = [math.log(a) for a in (1.25, 1.1, 1.2)]
    found = width.ratio([1.25, 1.1, 1.2], [1.0, 1.0, 1.0])
    assert found["ratio"] == pytest.approx(math.exp(statistics.fmean(logs)), abs=5e-4)
    bound = stats.ttest_1samp(logs, 0).confidence_interval(0.90).low
    assert found["lower"] == pytest.approx(math.exp(bound), abs=5e-4)


def test_a_point_is_compared_with_both_plain_servers_and_the_best_fixed_width() -> None:
    row = width.row(width.POINTS[0], measured())
    assert row["best_fixed"] == "fixed 4" and row["identical"]
    rounds = zip((2.0, 2.2, 1.9), (2.1, 2.0, 2.0), (0.8, 0.9, 0.7), strict=True)
    logs = [math.log((a + b) / 2 / c) for a, b, c in rounds]
    assert row["over_plain"]["adaptive"]["ratio"] == pytest.approx(
        math.exp(statistics.fmean(logs)), abs=5e-4
    )
    assert row["plain_step_ms"] == 10.0 and row["acceptance_length"] == 2.5
    assert row["deciding_share"] == pytest.approx(0.25 / (0.8 + 0.9 + 0.7), abs=5e-5)


def test_every_pass_takes_the_next_prompts() -> None:
    prompts = [Prompt((str(i),), chat=False) for i in range(5)]
    assert [[p.turns[0] for p in width.turn(prompts, at, 2)] for at in range(3)] == [
        ["0", "1"], ["2", "3"], ["4", "0"],
    ]  # fmt: skip


def test_the_arm_at_width_1_never_drafts() -> None:
    policy = width.NeverDrafts(8)
    assert policy.choose(["r"], 100, 100) == 1 and policy.widths[-1] == 8


def test_another_output_is_a_failure() -> None:
    rows = [width.row(width.POINTS[0], measured())]
    assert width.failure({"points": rows}) is None and width.table({"points": rows})
    rows.append(width.row(width.POINTS[1], measured(adaptive_ids=(1, 2, 4))))
    assert "dense, demo, 16 at a time" in (width.failure({"points": rows}) or "")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (width.Options(rounds=1), "rounds", 1),
        (width.Options(points="0,99"), "points", "99"),
        (width.Options(points=""), "points", ""),
    ],
)
def test_options_out_of_range_are_refused(
    options: width.Options, field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as refused:
        width.run(options)
    assert (refused.value.field, refused.value.value) == (field, value)


def test_at_least_twelve_points_are_measured_on_all_pairs() -> None:
    assert len(set(width.POINTS)) >= 12
    assert {point.pair for point in width.POINTS} == set(width.KV_TOKENS)
