"""The demo's figures."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.bench.demo import SAMPLING, Timed, outcome, show
from tests.bench.fake_server import FakeServer


def test_both_answers_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[Any] = []
    one, other = (
        FakeServer(name, lambda _, name=name: ["[", name, "]"], log, sglang=True, incremental=False)
        for name in ("left", "right")
    )
    with one, other:
        urls = {name: server.url for name, server in (("A", one), ("B", other))}
        show(urls, ["first", "second"])
    shown = capsys.readouterr().out
    assert "[left]" in shown and "[right]" in shown
    assert sorted(name for name, _, _ in log) == ["left", "left", "right", "right"]
    assert all(body["sampling_params"] == SAMPLING for _, _, body in log)


def test_the_outcome_of_two_servers() -> None:
    """Two prompts of 8 tokens: 4 s and 2 s without a draft; with it, 1 s each for a prefill and
    2 steps."""
    plain = [Timed([1] * 8, 0, 4.0), Timed([2] * 8, 0, 2.0)]
    dflash = [Timed([1] * 8, 2, 1.0), Timed([2] * 8, 2, 1.0)]
    assert outcome(plain, dflash) == {
        "identical": True,
        "acceptance_length": 3.5,
        "ar_tok_s": 2.67,
        "dflash_tok_s": 8.0,
        "speedup": 3.0,
        "speedup_by_prompt": {"median": 3.0, "min": 2.0, "max": 4.0},
        "ar_step_ms": 375.0,
        "dflash_step_ms": 333.33,
        "step_ratio": 0.889,
    }
    dflash[1] = Timed([2] * 7 + [3], 2, 1.0)
    assert not outcome(plain, dflash)["identical"]
