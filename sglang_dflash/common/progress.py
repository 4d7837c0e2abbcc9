"""Progress of a run, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Seconds between lines about something that runs: on a terminal they replace one another.
_BETWEEN_LINES, _ON_A_TERMINAL = 15.0, 1.0


def progress_bar(total: int, steady: bool = True) -> Any:
    """A bar of tqdm over `total` steps; if stderr is no terminal, a line now and then.

    Args:
        steady: whether the steps take about the same time. If not, how much is left is not known.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    unknown = {} if steady else {"bar_format": "{desc}{n_fmt}/{total_fmt} [{elapsed}]"}
    every = 0.1 if terminal else _BETWEEN_LINES
    return tqdm(total=total, dynamic_ncols=True, leave=not terminal, mininterval=every, **unknown)


@contextmanager
def waiting(bar: Any, awaited: str, last_time: float | None) -> Iterator[None]:
    """Show on the bar what is waited for, and for how long, until the block ends.

    Args:
        awaited: what is waited for, in words.
        last_time: seconds that it took the last time; None if that is not known.
    """
    before = "" if last_time is None else f", {last_time:.0f} s the last time"
    began, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        pause = 0.0
        while not ended.wait(pause):
            bar.set_description(f"{awaited}: {time.monotonic() - began:.0f} s{before}")
            pause = _ON_A_TERMINAL if sys.stderr.isatty() else _BETWEEN_LINES

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
