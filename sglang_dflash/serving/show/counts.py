"""What is counted of decode steps: kept tokens, accepted drafts and host time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from sglang_dflash.drafting.acceptance_length import VerifySteps


class RequestStep(NamedTuple):
    """What one request got from one decode step. See `drafting/acceptance_length.py`.

    Attributes:
        drafts: drafted tokens of the request that the step verified; 0 if it takes one token per
            step.
        accepted: drafts that the request keeps.
        tokens: all tokens that it keeps, the bonus token included.
    """

    drafts: int
    accepted: int
    tokens: int


class AcceptanceCounts:
    """Steps and tokens of live requests since the start, as integers.

    Attributes:
        drafted: verify steps, with their tokens.
        undrafted: steps without drafts, with theirs.
        accepted: steps that accepted, and kept, the draft at each of the B - 1 positions.
    """

    def __init__(self, block_size: int) -> None:
        self.drafted = self.undrafted = VerifySteps()
        self.accepted = [0] * (block_size - 1)
        # Verify steps by the number of their drafts.
        self._steps: Counter[int] = Counter()

    def add(self, steps: Sequence[RequestStep]) -> None:
        for drafts, accepted, tokens in steps:
            if not drafts:
                self.undrafted += VerifySteps(1, tokens)
                continue
            self.drafted += VerifySteps(1, tokens)
            self._steps[drafts] += 1
            for position in range(accepted):
                self.accepted[position] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Rounded to four digits; None without a step."""
        length = self.drafted.acceptance_length
        return None if length is None else round(length, 4)

    def by_position(self) -> list[float | None]:
        """Share of the steps with a draft at a position that accepted it; empty without a step."""
        shares: list[float | None] = []
        for position, accepted in enumerate(self.accepted if self._steps else ()):
            tried = sum(n for drafts, n in self._steps.items() if drafts > position)
            shares.append(round(accepted / tried, 4) if tried else None)
        return shares


class PhaseTimes:
    """Host time of the phases of decode steps; on an accelerator, the time to launch them.

    Attributes:
        seconds, calls: totals by phase.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
        self.calls[phase] = self.calls.get(phase, 0) + 1
