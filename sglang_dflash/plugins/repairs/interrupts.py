"""Ctrl-C and SIGTERM, which may reach all processes of a server: its first process handles them for
all."""

from __future__ import annotations

import multiprocessing
import signal
import threading

# Each signal, and the handler that a process begins with.
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def leave_to_server(_self: object) -> None:
    """Before the loop of a scheduler, a controller of data-parallel replicas or a detokenizer:
    ignore these signals in a child process, if it has no handler of its own.

    A terminal sends Ctrl-C to all processes of a server; systemd, `timeout` and others send
    SIGTERM to all.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if multiprocessing.parent_process() is None or not in_main_thread:
        return
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) == default:
            signal.signal(number, signal.SIG_IGN)
