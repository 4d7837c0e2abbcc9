"""Ctrl-C and SIGTERM, which may reach all processes of a server: its first process handles them for
all."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from typing import Any

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


def watch_while_serving(
    original: Callable[..., None],
    server_args: Any,
    tokenizer_manager: Any,
    *args: Any,
    **named: Any,
) -> None:
    """Around `http_server._setup_and_run_http_server`: when the server has ended, as after Ctrl-C,
    its processes are killed, and that is no crash of theirs."""
    try:
        original(server_args, tokenizer_manager, *args, **named)
    finally:
        watchdog = getattr(tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
