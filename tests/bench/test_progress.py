"""Progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import time

import pytest

from sglang_dflash.bench import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    to = Terminal()
    with progress.shown(3, to) as shown:
        shown.describe("counting")
        # It is drawn ten times per second at most.
        time.sleep(0.2)
        shown.advance(2)
    assert "counting" in to.getvalue() and "2/3" in to.getvalue() and "\r" in to.getvalue()


def test_a_pipe_gets_a_line_per_description_and_one_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, to = [100.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress.shown(4, to) as shown:
        shown.describe("starting")
        now[0] += 100
        shown.describe("first")
        shown.describe("first")
        shown.advance()
        now[0] += progress.LINE_EVERY_S
        shown.advance()
        now[0] += 1
        shown.advance()
        shown.advance()
    assert to.getvalue().splitlines() == [
        "[0/4, 0 s] starting",
        "[0/4, 100 s] first",
        "[2/4, 115 s, about 15 s left] first",
        "[4/4, 116 s] first",
    ]
