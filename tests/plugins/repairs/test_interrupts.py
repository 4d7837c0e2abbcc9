"""Ctrl-C and SIGTERM, and the processes of a server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.plugins.repairs.interrupts import leave_to_server, watch_while_serving
from sglang_dflash.serving.start.one_line_errors import use_one_line

SPAWN = multiprocessing.get_context("spawn")


def _loop(repaired: bool, test: Connection) -> None:
    # A test run's own choice would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if repaired:
        leave_to_server(None)
    test.send("begun")
    test.recv()


def _survives(number: signal.Signals, repaired: bool) -> bool:
    """Return whether a child survives a signal."""
    # No event: a child that dies while it waits for one leaves its lock taken.
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=_loop, args=(repaired, there))
    child.start()
    assert here.poll(60) and here.recv() == "begun" and child.pid is not None
    os.kill(child.pid, number)
    here.send("end")
    child.join(60)
    of_signal = {signal.SIGINT: 1, signal.SIGTERM: -signal.SIGTERM}[number]
    assert child.exitcode in (0, of_signal)
    return child.exitcode == 0


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


class _Ending:
    """A server that ends by Ctrl-C and then kills its process, as SGLang does.

    Attributes:
        watchdog: of the process.
        crash_seen: set when the watchdog has sent its signal.
    """

    def __init__(self) -> None:
        # Spawned processes import this file.
        from sglang.srt.utils.watchdog import SubprocessWatchdog

        self.process = SPAWN.Process(target=time.sleep, args=(60,))
        self.process.start()
        self.watchdog = SubprocessWatchdog([self.process], interval=0.05)
        self.crash_seen = threading.Event()
        signal.signal(signal.SIGQUIT, lambda *_: self.crash_seen.set())

    def serve(self, _server_args: Any, tokenizer_manager: Any, *_: Any) -> None:
        tokenizer_manager._subprocess_watchdog = self.watchdog
        self.watchdog.start()
        raise KeyboardInterrupt

    def end(self, run: Callable[..., None]) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(None, SimpleNamespace(), None)
        self.process.kill()
        self.process.join(60)


@pytest.fixture
def ending() -> Iterator[_Ending]:
    before = signal.getsignal(signal.SIGQUIT)
    server = _Ending()
    yield server
    server.watchdog.stop()
    signal.signal(signal.SIGQUIT, before)


def test_an_end_looks_like_a_crash_without_the_row(ending: _Ending) -> None:
    ending.end(ending.serve)
    assert ending.crash_seen.wait(60)


def test_an_end_is_no_crash(ending: _Ending) -> None:
    ending.end(partial(watch_while_serving, ending.serve))
    assert ending.watchdog._thread is None and not ending.crash_seen.wait(0.5)


def test_the_server_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    use_one_line()
    for error, shown in ((KeyboardInterrupt(), False), (RuntimeError("x"), True)):
        sys.excepthook(type(error), error, None)
        assert bool(capsys.readouterr().err) is shown
