"""How far a long run is: a bar on a terminal, lines elsewhere. Both go to stderr.

tqdm is imported when a bar is drawn, because some experiments run on bare machines.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

# In a pipe, a line at least this often while steps are done.
LINE_EVERY_S = 15.0


class Progress(Protocol):
    """Counts steps of a run and shows what is being done. Safe to call from several threads."""

    def describe(self, text: str) -> None:
        """Show what is being done now."""

    def advance(self, steps: int = 1) -> None:
        """Count steps as done."""


class Lines:
    """A line whenever the description changes, and every `LINE_EVERY_S` seconds of progress."""

    def __init__(self, total: int, to: TextIO) -> None:
        self._total, self._to, self._done, self._text = total, to, 0, ""
        self._began = self._shown = time.monotonic()
        # Since the last description before the first step: servers start before that.
        self._first = self._began
        self._lock = threading.Lock()

    def describe(self, text: str) -> None:
        with self._lock:
            if not self._done:
                self._first = time.monotonic()
            if text != self._text:
                self._text = text
                self._print()

    def advance(self, steps: int = 1) -> None:
        with self._lock:
            self._done += steps
            if self._done == self._total or time.monotonic() - self._shown >= LINE_EVERY_S:
                self._print()

    def _print(self) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._began
        left = ""
        if 0 < self._done < self._total:
            per_step = (self._shown - self._first) / self._done
            left = f", about {per_step * (self._total - self._done):.0f} s left"
        line = f"[{self._done}/{self._total}, {seconds:.0f} s{left}] {self._text}"
        print(line, file=self._to, flush=True)


class Bar:
    """A bar on a terminal, with the time that is left."""

    def __init__(self, total: int, to: TextIO) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, file=to, dynamic_ncols=True, leave=False)

    def describe(self, text: str) -> None:
        self._bar.set_description(text)

    def advance(self, steps: int = 1) -> None:
        self._bar.update(steps)

    def close(self) -> None:
        self._bar.close()


class Silent:
    """Shows nothing: for ranks other than the first."""

    def describe(self, text: str) -> None:
        """Nothing to show."""

    def advance(self, steps: int = 1) -> None:
        """Nothing to show."""


@contextmanager
def shown(total: int, to: TextIO | None = None) -> Iterator[Progress]:
    """Show the progress of `total` steps on `to`, which is stderr by default."""
    stream = sys.stderr if to is None else to
    if not stream.isatty():
        yield Lines(total, stream)
        return
    bar = Bar(total, stream)
    try:
        yield bar
    finally:
        bar.close()
