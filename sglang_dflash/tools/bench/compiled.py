"""Kernels that a server compiles while it is measured: SGLang does for a batch of a new shape, and
all of its requests wait for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

# A part of the line that SGLang logs about it (`sglang.srt.utils.triton_load_watch`).
LOGGED = b"to compile after serving started"
# Compilations of how many seconds are logged; without this, those of a second or more.
ENVIRONMENT = {"SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS": "0.05"}
# Passes until one counts with what was compiled in it.
TRIES = 4


def compilations(log: Path | None, before: int | None = None) -> int | None:
    """The number of compilations that a server has logged after so many `before`; None without its
    log."""
    return None if log is None else log.read_bytes().count(LOGGED) - (before or 0)


class CountsCompilations(Protocol):
    """A pass, of which it is known how many kernels were compiled in it, or not."""

    @property
    def compilations(self) -> int | None: ...


P = TypeVar("P", bound=CountsCompilations)


def measure_settled(measure: Callable[[], P], flush: Callable[[], Any]) -> P:
    """Measure a pass, and again, after `flush`, while kernels were compiled in it: `TRIES` times at
    most."""
    done = measure()
    for _ in range(TRIES - 1):
        if not done.compilations:
            break
        flush()
        done = measure()
    return done


def count_compilations(passes: Sequence[CountsCompilations]) -> int | None:
    """The number of compilations in passes; None if that of one is not known."""
    counts = [measured.compilations for measured in passes if measured.compilations is not None]
    return sum(counts) if len(counts) == len(passes) else None
