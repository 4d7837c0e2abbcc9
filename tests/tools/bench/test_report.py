"""Figures, report and gate of `sglang-dflash bench`, from made-up measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench import picture, report
from sglang_dflash.tools.bench.differences import Runs, differences
from sglang_dflash.tools.bench.load import Answer, BenchPass
from sglang_dflash.tools.bench.report import Measurements
from sglang_dflash.tools.bench.settings import BenchSettings


def answer(
    tokens: int = 5,
    first: float = 0.5,
    seconds: float = 1.5,
    text: str = "a",
    ids: tuple[int, ...] | None = None,
) -> Answer:
    return Answer(text, ids, tokens, first, seconds)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([10, 11, 12], [20, 21, 22], False),
        ([20, 21, 22], [10, 11, 12], False),
        # The ranges do not overlap, but are as large as the difference.
        ([10, 11, 13], [14, 15, 16], True),
        ([10, 11, 12], [11, 12, 13], True),
        ([10, 10, 10], [10, 10, 10], True),
        # Two rounds show no spread.
        ([10, 11], [20, 21], None),
        ([10, 11, 12], [20], None),
    ],
)
def test_a_difference_is_one_beyond_the_spread(
    a: list[float], b: list[float], expected: bool | None
) -> None:
    assert report.is_within_noise(a, b) is expected


def test_equal_arms_are_rarely_told_apart() -> None:
    random = numpy.random.default_rng(0)
    pairs = random.normal(100, 5, (2000, 2, report.LEAST_ROUNDS))
    found = [report.is_within_noise(a, b) for a, b in pairs]
    assert found.count(False) / len(found) < 0.025


def made_up(texts: list[str], seconds: float = 2.0) -> BenchPass:
    return BenchPass(seconds, [[answer(text=text)] for text in texts], VerifySteps(4, 10))


def test_figures_of_two_rounds_are_those_of_all_their_answers() -> None:
    passes = [
        BenchPass(2.0, [[answer(5, 0.1, 0.5)], [answer(9, 0.3, 0.7)]], VerifySteps(3, 12)),
        BenchPass(3.0, [[answer(1, 0.2, 0.2)], [answer(5, 0.4, 1.2)]], VerifySteps(1, 2)),
    ]
    row = report.row(passes)
    assert row["tokens"] == 20 and row["answers"] == 4
    # 14 tokens in 2 s, 6 in 3 s.
    assert (row["output_tok_s_min"], row["output_tok_s"], row["output_tok_s_max"]) == (2, 4.5, 7)
    assert row["ttft_ms"] == 250 and row["acceptance_length"] == 3.5
    # Of the three answers with more than one token: 100, 50 and 200 ms per token after the first.
    assert (row["tpot_ms"], row["tpot_ms_p95"], row["tpot_ms_p99"]) == (100, 190, 198)
    plain = report.row([BenchPass(1.0, [[answer(1, 0.1, 0.1)]], VerifySteps(0, 0))])
    assert plain["acceptance_length"] is None and plain["tpot_ms"] is None


# By a server, of itself.
TOLD = {"model": "m", "worker": "w", "dtype": "float32", "device": "CPU", "engine": "1",
        "torch": "2"}  # fmt: skip


def test_the_report_shows_every_figure(tmp_path: Path) -> None:
    from PIL import Image

    same = ["x", "y"]
    runs: Runs = {("demo", 2): {"ar": [made_up(same, 4.0)] * 3, "dflash": [made_up(same, 2.0)] * 3}}
    servers = {arm: {**TOLD, "worker": arm} for arm in ("ar", "dflash")}
    settings = BenchSettings(command="sglang-dflash bench")
    result = report.summarize(
        settings, {"demo": 2}, {"demo": 1}, Measurements(runs, servers=servers)
    )
    assert result["arms"] == ["ar", "dflash"] and result["differing_answers"] == {"dflash": 0}
    assert result["outputs"].startswith("outputs: the same in all arms (6 answers each")
    assert [row["ratio"] for row in result["rows"]] == [1.0, 2.0]
    times = "500.0/500.0/500.0 | 250.0/250.0/250.0"
    shown = report.markdown(result)
    assert f"| demo | 2 | dflash | 5.0 (5.0 to 5.0) | 2.0x | {times} | 2.5 |" in shown
    assert "- command: sglang-dflash bench\n" in shown
    assert "- ar: worker ar\n- dflash: worker dflash\n- all arms: model m; dtype float32; " in shown
    picture.draw(result, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        assert image.format == "PNG" and len(image.getcolors(1 << 24) or ()) > 10


def test_the_report_tells_whether_an_embedded_pair_knows_its_text() -> None:
    runs: Runs = {("demo", 1): {"ar": [made_up(["x"])]}}
    measured, one = Measurements(runs, servers={"ar": TOLD}), {"demo": 1}
    dense, chat = (
        report.markdown(report.summarize(BenchSettings(pair=pair), one, one, measured))
        for pair in ("dense", "smollm2")
    )
    assert "both models have memorized" in dense
    assert "a chat model" in chat
    # Of one's own prompts it knows nothing, nor of another pair's.
    for other in ({"dataset_file": "mine.jsonl"}, {"dataset": ("demo",)}):
        settings = BenchSettings(pair="smollm2", **other)
        assert report.summarize(settings, one, one, measured)["text"] is None


@pytest.mark.parametrize(
    ("asked", "device", "differs"),
    [
        ({"pair": "smollm2"}, "CPU, 2 cores", True),
        ({}, "CPU, 2 cores", True),
        ({}, "an H100", False),
        ({"server_flags": ("--speculative-dflash-width", "auto")}, "CPU, 2 cores", False),
        ({"arms": ("ar", "builtin")}, "CPU, 2 cores", False),
        ({"target": "T", "draft": "D"}, "CPU, 2 cores", False),
        ({"temperature": 0.6}, "CPU, 2 cores", False),
    ],
    ids=str,
)
def test_the_report_begins_with_what_a_server_does_differently(
    asked: dict[str, Any], device: str, differs: bool
) -> None:
    runs: Runs = {("demo", 1): {"ar": [made_up(["x"])], "dflash": [made_up(["x"])]}}
    told = {**TOLD, "device": device}
    measured = Measurements(runs, servers={"ar": told, "dflash": told})
    result = report.summarize(BenchSettings(**asked), {"demo": 1}, {"demo": 1}, measured)
    first = report.card(result)[0]
    assert ("`-- --speculative-dflash-width auto` measures that" in first) == differs


def test_differences_name_prompt_arm_and_place() -> None:
    def of(*ids: tuple[int, ...]) -> BenchPass:
        return BenchPass(1.0, [[answer(ids=one)] for one in ids], VerifySteps(0, 0))

    same, at = of((1, 2, 3), (4, 5)), "data set demo, prompt"
    runs: Runs = {
        ("demo", 1): {
            "ar": [same, same],
            "b": [same, of((1, 2, 3), (4, 5, 6))],
            "c": [of((1, 9, 3), (4, 5)), same],
        }
    }
    found = {arm: list(map(str, places)) for arm, places in differences(runs).items()}
    differs = "concurrency 1: the answer differs from ar's from"
    assert found == {
        "b": [f"arm b, {at} 1, {differs} token 2 on"],
        "c": [f"arm c, {at} 0, {differs} token 1 on"],
    }
    # Without ids on one side it is the text that counts.
    texts = [BenchPass(1.0, [[answer(text="ab")]], VerifySteps(0, 0))]
    (place,) = differences({("demo", 1): {"ar": [of((1, 2))], "b": texts}})["b"]
    assert str(place).endswith("from character 1 on")
