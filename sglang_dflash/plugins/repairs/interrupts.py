"""Ctrl-C, which reaches all processes of a server, and which its first process handles for all."""

from __future__ import annotations

import multiprocessing
import signal
import threading


def ignore_interrupts(_self: object) -> None:
    """Before the loop of a scheduler or a detokenizer: ignore SIGINT in a child process."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if multiprocessing.parent_process() is not None and in_main_thread:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
