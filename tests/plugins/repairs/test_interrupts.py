"""Ctrl-C and the processes of a server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Event

import pytest

from sglang_dflash.plugins.repairs.interrupts import ignore_interrupts
from sglang_dflash.serving.start.one_line_errors import use_one_line

SPAWN = multiprocessing.get_context("spawn")


def _loop(repaired: bool, begun: Event, ended: Event) -> None:
    # A test run's own choice would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if repaired:
        ignore_interrupts(None)
    begun.set()
    ended.wait(60)


def _interrupted(repaired: bool) -> bool:
    """Return whether a child survives Ctrl-C."""
    begun, ended = SPAWN.Event(), SPAWN.Event()
    child = SPAWN.Process(target=_loop, args=(repaired, begun, ended))
    child.start()
    assert begun.wait(60) and child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    time.sleep(0.5)
    lives = child.is_alive()
    ended.set()
    child.join(60)
    assert child.exitcode == (0 if lives else 1)
    return lives


def test_a_child_dies_of_ctrl_c_without_the_rows() -> None:
    assert not _interrupted(repaired=False)


def test_a_child_leaves_it_to_the_server() -> None:
    assert _interrupted(repaired=True)
    # Not so a process of the user's that runs the loop itself.
    before = signal.getsignal(signal.SIGINT)
    ignore_interrupts(None)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_server_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    use_one_line()
    for error, shown in ((KeyboardInterrupt(), False), (RuntimeError("x"), True)):
        sys.excepthook(type(error), error, None)
        assert bool(capsys.readouterr().err) is shown
