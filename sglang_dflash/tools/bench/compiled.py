"""Kernels that a server compiles while it is measured. SGLang compiles for a batch of a new shape,
and all of the batch's requests wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

# Part of the line that SGLang logs for a compilation (`sglang.srt.utils.triton_load_watch`).
LOGGED = b"to compile after serving started"
# Log compilations of this many seconds or more. SGLang's default is a second.
ENVIRONMENT = {"SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS": "0.05"}
# Passes at most; the last one counts, even if kernels were compiled in it.
TRIES = 4


def compilations(log: Path | None, before: int | None = None) -> int | None:
    """The number of compilations that a server has logged since there were `before`; None if its
    log is not known."""
    return None if log is None else log.read_bytes().count(LOGGED) - (before or 0)


class CountsCompilations(Protocol):
    """A pass with the number of kernels that were compiled in it; None if it is not known."""

    @property
    def compilations(self) -> int | None: ...


P = TypeVar("P", bound=CountsCompilations)


def measure_settled(measure: Callable[[], P], flush: Callable[[], Any]) -> P:
    """Measure a pass. Call `flush` and repeat it while kernels were compiled in it, up to `TRIES`
    passes in all."""
    done = measure()
    for _ in range(TRIES - 1):
        if not done.compilations:
            break
        flush()
        done = measure()
    return done


def count_compilations(passes: Sequence[CountsCompilations]) -> int | None:
    """Return the number of compilations in all passes; None if it is not known for one of them."""
    counts = [measured.compilations for measured in passes if measured.compilations is not None]
    return sum(counts) if len(counts) == len(passes) else None
