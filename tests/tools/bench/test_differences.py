"""`sglang-dflash bench` tells whether the first token that differs was a near-tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.tools.bench import datasets
from tests.tools.bench.fake_server import FakeServer, echo
from tests.tools.bench.test_compare import Captured, bench, read, urls

PROMPTS = [prompt.turns[0] for prompt in datasets.load("stdlib", 3)]


def later(prompt: Any) -> list[str]:
    """Return `echo`'s pieces, except for the third one of the second prompt."""
    pieces = echo(prompt)
    return [*pieces[:2], "oops", *pieces[3:]] if prompt == PROMPTS[1] else pieces


def arms(*gaps: float | None, dtype: str = "float32") -> tuple[FakeServer, FakeServer]:
    a = FakeServer("true", echo, [], sglang=True, dtype=dtype)
    b = FakeServer("false", later, [], sglang=True, dtype=dtype)
    a.gap, b.gap = gaps
    return a, b


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [((1e-4, 2e-4), "a near-tie;"), ((1e-4, 0.3), "no near-tie: rounding does not explain it;")],
)
def test_the_gate_tells_whether_rounding_explains_it(
    gaps: tuple[float, float], verdict: str, tmp_path: Path, capsys: Captured
) -> None:
    a, b = arms(*gaps)
    with a, b:
        code, out, err = bench(capsys, tmp_path, *urls(a, b), "--concurrency", "1")
    told = f"differ by {gaps[0]:.2g} on true and {gaps[1]:.2g} on false, {verdict} no figure of"
    assert code == 1 and not out and "from token 2 on (and 2 more); there the log-" in err
    assert told in " ".join(err.split())
    # Both are asked after the same tokens: the prompt, and what both have answered.
    ids = [*map(ord, PROMPTS[1]), *(sum(map(ord, piece)) for piece in echo(PROMPTS[1])[:2])]
    for server in (a, b):
        asked = [what for _, what, body in server.requests if body.get("return_logprob")]
        assert asked == [PROMPTS[1], ids]


def test_where_answers_may_differ_the_report_tells_it(tmp_path: Path, capsys: Captured) -> None:
    a, b = arms(0.1, 0.2, dtype="bfloat16")
    asked = ["--concurrency", "1", "--rounds", "2"]
    with a, b:
        assert bench(capsys, tmp_path, *urls(a, b), *asked)[0] == 0
        b.gap = 0.3
        assert bench(capsys, tmp_path / "far", *urls(a, b), *asked)[0] == 0
    near, far = read(tmp_path), read(tmp_path / "far")
    told = near["near_ties"]["false"]
    assert told["gaps"] == pytest.approx({"true": 0.1, "false": 0.2})
    assert (told["near"], told["near_tie"]) == (0.25, True)
    assert "did for: false 2 of 6; of false the first: there the log-prob" in near["outputs"]
    assert not far["near_ties"]["false"]["near_tie"] and "no near-tie" in far["outputs"]
    # Once, whatever differs after it.
    assert sum("return_logprob" in body for _, _, body in a.requests) == 4


@pytest.mark.parametrize("how", ["no log-probabilities", "sampled", "another API"])
def test_nothing_is_told_where_it_is_not_known(how: str, tmp_path: Path, capsys: Captured) -> None:
    a, b = arms(0.1, None if how == "no log-probabilities" else 0.1)
    a.deterministic = b.deterministic = True
    b.sglang = how != "another API"
    more = ["--temperature", "1", "--rounds", "1"] if how == "sampled" else ["--rounds", "1"]
    with a, b:
        asked = [*urls(a, b), "--concurrency", "1", "--dtype", "float32", *more]
        code, _, err = bench(capsys, tmp_path, *asked)
    assert code == 1 and "the answer differs" in err and "near-tie" not in err
