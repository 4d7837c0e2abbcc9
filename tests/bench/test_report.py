"""Figures, report and gate of `sglang-dflash bench`, from made-up measurements."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from sglang_dflash.bench import picture, report
from sglang_dflash.bench.gate import Runs, differences
from sglang_dflash.bench.load import Answer, Pass
from sglang_dflash.bench.settings import Settings
from sglang_dflash.core.acceptance_length import VerifySteps

HARDWARE = {
    "date": "2026-01-02",
    "processor": "abacus",
    "cores": 2,
    "memory_gib": 4.0,
    "accelerator": None,
    "python": "3.11",
    "sglang": "1",
    "torch": "2",
}


def answer(
    tokens: int = 5,
    first: float = 0.5,
    seconds: float = 1.5,
    text: str = "a",
    ids: tuple[int, ...] | None = None,
) -> Answer:
    return Answer(text, ids, tokens, first, seconds)


def made_up(texts: list[str], seconds: float = 2.0) -> Pass:
    return Pass(seconds, [[answer(text=text)] for text in texts], VerifySteps(4, 10))


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_percentiles_are_numpys(fraction: float) -> None:
    rng = random.Random(1)
    for length in (1, 2, 7, 20):
        values = [rng.random() for _ in range(length)]
        assert report.percentile(values, fraction) == pytest.approx(
            numpy.quantile(values, fraction)
        )


def test_figures_of_two_rounds_are_those_of_all_their_answers() -> None:
    passes = [
        Pass(2.0, [[answer(5, 0.1, 0.5)], [answer(9, 0.3, 0.7)]], VerifySteps(3, 12)),
        Pass(3.0, [[answer(1, 0.2, 0.2)], [answer(5, 0.4, 1.2)]], VerifySteps(1, 2)),
    ]
    row = report.row(passes)
    assert (
        row["tokens"] == 20
        and row["seconds"] == 5.0
        and row["output_tok_s"] == 4.0
        and row["answers"] == 4
    )
    assert row["ttft_ms"] == 250 and row["acceptance_length"] == 3.5
    # Of the three answers with more than one token: 100, 50 and 200 ms per token after the first.
    assert row["tpot_ms"] == 100 and row["tpot_ms_p95"] == 190
    plain = report.row([Pass(1.0, [[answer(1, 0.1, 0.1)]], VerifySteps(0, 0))])
    assert plain["acceptance_length"] is None and plain["tpot_ms"] is None


def report_of(dtype: str, other: list[str]) -> dict[str, Any]:
    runs: Runs = {("demo", 2): {"ar": [made_up(["x", "y"], 4.0)], "dflash": [made_up(other, 2.0)]}}
    settings = Settings(
        dtype=dtype, command="sglang-dflash bench", num_prompts=2, concurrency="2"
    ).resolve(False)
    return report.summarize(settings, ["ar", "dflash"], {"demo": 2}, runs, [], HARDWARE)


def test_the_report_shows_every_figure(tmp_path: Path) -> None:
    from PIL import Image

    result = report_of("float32", ["x", "y"])
    assert result["identical"] and [row["ratio"] for row in result["rows"]] == [1.0, 2.0]
    shown = report.markdown(result)
    assert "| demo | 2 | dflash | 5.0 | 2.0x | 500.0 (500.0) | 250.0 (250.0) | 2.5 |" in shown
    for part in (
        "2 of demo",
        "sglang-dflash bench",
        "2 cores of abacus",
        "2026-01-02",
        "embedded dense pair",
        "48 new tokens",
    ):
        assert part in shown, part
    assert report.table(result).row_count == 2
    picture.draw(result, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        assert (
            image.format == "PNG"
            and min(image.size) > 300
            and len(image.getcolors(1 << 24) or ()) > 10
        )


def test_a_rounded_dtype_says_on_its_first_line_how_many_outputs_differ() -> None:
    assert (
        report.card(report_of("float32", ["x", "y"]))[0]
        == "outputs: the same in all arms (2 answers each, greedy, float32)"
    )
    result = report_of("bfloat16", ["x", "z"])
    assert (
        report.card(result)[0]
        == "outputs may differ from ar's by near-ties of bfloat16, and did for: dflash 1 of 2"
    )
    assert not result["identical"] and result["differing_answers"] == {"dflash": 1}


def test_differences_name_prompt_arm_and_place() -> None:
    def of(*ids: tuple[int, ...]) -> Pass:
        return Pass(1.0, [[answer(ids=one)] for one in ids], VerifySteps(0, 0))

    same = of((1, 2, 3), (4, 5))
    runs: Runs = {
        ("demo", 1): {
            "ar": [same, same],
            "b": [same, of((1, 2, 3), (4, 5, 6))],
            "c": [of((1, 9, 3), (4, 5)), same],
        }
    }
    found = differences(runs, "ar")
    assert [(d.arm, d.prompt, d.position, d.unit) for d in found] == [
        ("b", 1, 2, "token"),
        ("c", 0, 1, "token"),
    ]
    assert str(found[1]).startswith(
        "arm c, data set demo, prompt 0, concurrency 1: "
        "the answer differs from ar's from token 1 on"
    )
    # Without ids on one side it is the text that counts.
    mixed: Runs = {
        ("demo", 1): {
            "ar": [of((1, 2))],
            "b": [Pass(1.0, [[answer(text="ab")]], VerifySteps(0, 0))],
        }
    }
    assert [(d.position, d.unit) for d in differences(mixed, "ar")] == [(1, "character")]
