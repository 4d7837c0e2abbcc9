"""The demo's figures."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.bench.demo import SAMPLING, DemoArm, acceptance_between, outcome, show
from sglang_dflash.serving.show.counts import AcceptanceCounts, RequestStep
from tests.bench.fake_server import FakeServer

FULL = RequestStep(drafts=7, accepted=7, tokens=8)


def shown(counts: AcceptanceCounts) -> dict[str, Any]:
    """Of /server_info."""
    total = counts.drafted
    return {"verify_steps": total.steps, "committed_tokens": total.tokens}


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


@pytest.mark.parametrize("earlier", [0, 1, 1237])
def test_the_acceptance_between_two_readings_is_exact(earlier: int) -> None:
    """13 steps of 8 tokens are 8.0. The mean before, 6.333..., is rounded in the report."""
    counts = AcceptanceCounts(8)
    counts.add([FULL, FULL, RequestStep(7, 2, 3)] * earlier)
    before = shown(counts)
    assert acceptance_between(before, before) is None
    counts.add([FULL] * 13)
    assert acceptance_between(before, shown(counts)) == 8.0


def test_the_outcome_of_two_arms() -> None:
    """Two prompts of 8 tokens: 4 s and 2 s without a draft; with it, 1 s each for a prefill and
    2 steps."""
    counts = AcceptanceCounts(8)
    before = shown(counts)
    counts.add([FULL._replace(accepted=3, tokens=4)] * 4)
    outputs = [[1] * 8, [2] * 8]
    plain, dflash = (DemoArm(None, outputs) for _ in range(2))
    plain.seconds, dflash.seconds = [4.0, 2.0], [1.0, 1.0]
    assert outcome(plain, dflash, before, shown(counts)) == {
        "identical": True,
        "acceptance_length": 4.0,
        "ar_tok_s": 2.67,
        "dflash_tok_s": 8.0,
        "speedup": 3.0,
        "speedup_by_prompt": {"median": 3.0, "min": 2.0, "max": 4.0},
        "ar_step_ms": 375.0,
        "dflash_step_ms": 333.33,
        "step_ratio": 0.889,
    }
    dflash.outputs = [[1] * 8, [2] * 7 + [3]]
    assert not outcome(plain, dflash, before, shown(counts))["identical"]
