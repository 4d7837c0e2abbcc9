"""Ctrl-C and SIGTERM, and the processes of a server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Event

import pytest

from sglang_dflash.plugins.repairs.interrupts import leave_to_server
from sglang_dflash.serving.start.one_line_errors import use_one_line

SPAWN = multiprocessing.get_context("spawn")


def _loop(repaired: bool, begun: Event, ended: Event) -> None:
    # A test run's own choice would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if repaired:
        leave_to_server(None)
    begun.set()
    ended.wait(60)


def _survives(number: signal.Signals, repaired: bool) -> bool:
    """Return whether a child survives a signal."""
    begun, ended = SPAWN.Event(), SPAWN.Event()
    child = SPAWN.Process(target=_loop, args=(repaired, begun, ended))
    child.start()
    assert begun.wait(60) and child.pid is not None
    os.kill(child.pid, number)
    time.sleep(0.5)
    lives = child.is_alive()
    ended.set()
    child.join(60)
    of_signal = {signal.SIGINT: 1, signal.SIGTERM: -signal.SIGTERM}[number]
    assert child.exitcode == (0 if lives else of_signal)
    return lives


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)


@SIGNALS
def test_a_child_dies_without_the_rows(number: signal.Signals) -> None:
    assert not _survives(number, repaired=False)


@SIGNALS
def test_a_child_leaves_it_to_the_server(number: signal.Signals) -> None:
    assert _survives(number, repaired=True)
    # Not so a process of the user's that runs the loop itself.
    before = signal.getsignal(number)
    leave_to_server(None)
    assert signal.getsignal(number) is before


def _has_handler(handled: Event) -> None:
    signal.signal(signal.SIGTERM, lambda *_: handled.set())
    leave_to_server(None)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_of_sglangs_stays() -> None:
    handled = SPAWN.Event()
    child = SPAWN.Process(target=_has_handler, args=(handled,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and handled.is_set()


def test_the_server_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    use_one_line()
    for error, shown in ((KeyboardInterrupt(), False), (RuntimeError("x"), True)):
        sys.excepthook(type(error), error, None)
        assert bool(capsys.readouterr().err) is shown
