"""Ctrl-C reaches all processes of a server. Its first one shuts down and ends the others."""

from __future__ import annotations

import multiprocessing
import signal
import threading


def leave_to_the_server(_self: object) -> None:
    """Before the loop of a scheduler or a detokenizer."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if multiprocessing.parent_process() is not None and in_main_thread:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
