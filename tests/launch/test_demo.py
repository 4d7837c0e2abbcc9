"""The demo's figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.demo.answer_picture import TimedAnswer
from launch.demo.main import (
    MEASURED,
    MeasuredAnswer,
    config_of,
    loops,
    main,
    median_prompt,
    outcome,
    prompts_of,
    speedups,
)
from launch.demo.race import LINES, LiveAnswer, frame, race
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.demo_pairs.pairs import DemoPair, demo_pair
from sglang_dflash.tools.demo_pairs.public_target import KIND
from tests.tools.bench.fake_server import FakeServer


def test_a_race_is_shown_on_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt, and both answers with the tokens per step."""
    log: list[Any] = []
    one, other = (
        FakeServer(name, lambda _, name=name: ["[", name, "]"], log, sglang=True, incremental=False)
        for name in ("left", "right")
    )
    with one, other:
        urls = {name: server.url for name, server in (("A", one), ("B", other))}
        race(urls, [("first\nprompt", [1]), ("second", [2])], {"temperature": 0})
    shown = capsys.readouterr().out
    assert "[left]" in shown and "[right]" in shown and "> first prompt" in shown
    assert not [line for line in shown.splitlines() if len(line) > 80]
    assert sorted(name for name, _, _ in log) == ["left", "left", "right", "right"]
    assert all(body["sampling_params"] == {"temperature": 0} for _, _, body in log)


def test_an_answer_as_it_was_at_a_moment() -> None:
    lane = LiveAnswer("DFLASH")
    lane.steps, lane.times = ["a", " b c", " d"], [(0.5, 1), (1.0, 3), (2.0, 4)]
    assert lane.until(1.5) == TimedAnswer("DFLASH", ["a", " b c"], 3, 1.5)
    assert lane.until(0.1).tokens == 0 and lane.until(2.0).steps == lane.steps


def test_the_picture_is_of_the_median_prompt() -> None:
    plain = [MeasuredAnswer([1], 0, seconds) for seconds in (3.0, 8.0, 2.0, 4.0)]
    assert median_prompt(plain, [MeasuredAnswer([1], 1, 1.0)] * 4) == 0
    # Of the answers that do not loop.
    plain[0] = MeasuredAnswer([*range(12)] * 2, 0, 3.0)
    assert not loops([*range(12), *range(11)]) and loops(plain[0].ids)
    assert median_prompt(plain, [MeasuredAnswer([1], 1, 1.0)] * 4) == 3
    assert median_prompt(plain[:1], plain[:1]) == 0


def test_a_panel_is_clipped_to_the_last_lines() -> None:
    lane = LiveAnswer("DFLASH")
    lane.steps, lane.times = [f"word{i} and more " for i in range(200)], [(10.0, 800)]
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(frame("a prompt " * 30, [lane, lane]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 22 and max(map(len, lines)) <= 80
    assert "word199" in lines[LINES + 1] and "80.0 tokens/s, 4.00 per step" in lines[1]


def test_the_chat_pair_is_asked_chats_and_served_as_to_users() -> None:
    pair = DemoPair(KIND, demo_pair("dense").target, Path("draft"), ())
    asked = prompts_of(pair)
    assert len(asked) == MEASURED and all(p.chat and len(p.turns) == 1 for _, p in asked)
    assert [task for task, _ in asked] == ["chat", "code", "edits"] * 4
    config = config_of(pair, dflash=True, on_gpu=False)
    assert "--speculative-dflash-width" not in config.flags
    assert config.flags["--dtype"] == "float32"
    assert config_of(pair, dflash=True, on_gpu=True).flags["--dtype"] == "bfloat16"
    dense = demo_pair("dense")
    assert "--speculative-dflash-width" in config_of(dense, dflash=True, on_gpu=False).flags
    assert prompts_of(dense)[0] == ("text", Prompt((dense.prompts[0],), chat=False))


def test_the_outcome_of_two_servers() -> None:
    """Two prompts of 8 tokens: 4 s and 2 s without a draft; with it, 1 s each for a prefill and
    2 steps."""
    plain = [MeasuredAnswer([1] * 8, 0, 4.0), MeasuredAnswer([2] * 8, 0, 2.0)]
    dflash = [MeasuredAnswer([1] * 8, 2, 1.0), MeasuredAnswer([2] * 8, 2, 1.0)]
    assert outcome(plain, dflash) == {
        "identical": True,
        "acceptance_length": 3.5,
        "ar_tok_s": 2.67,
        "dflash_tok_s": 8.0,
        "speedup": 3.0,
        "speedup_by_prompt": {"median": 3.0, "min": 2.0, "max": 4.0},
        "ar_step_ms": 375.0,
        "dflash_step_ms": 333.33,
        "step_ratio": 0.89,
    }
    assert speedups(["chat", "edits"], plain, dflash) == {"chat": 4.0, "edits": 2.0}
    dflash[1] = MeasuredAnswer([2] * 7 + [3], 2, 1.0)
    assert not outcome(plain, dflash)["identical"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nonesuch"], "demo: --model: 'nonesuch'; choose one of dense"),
        (["--model", "dense", "--out", "/"], "demo: --out: '/'; it cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value.code).startswith(words)
