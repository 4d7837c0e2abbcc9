"""What a decode step costs at each width, from measured steps."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Measurements of a width before its cost counts as known.
ENOUGH = 3
# Steps in one place after which what was measured of a width before them does not count any more.
STALE = 1000
# Steps in one place after which widths that were only guessed there are measured.
SETTLED = 32
# A measurement weighs at least this much. What all widths have in common (other processes, clock
# rates) is followed faster, as one factor.
LEAST_WEIGHT, DRIFT_WEIGHT = 0.05, 0.1
# A measurement counts as at most so many times what was expected: steps that a collection of
# garbage or another process has delayed are no cost of a width.
OUTLIER = 2.0
# So many measurements in a row that are off by this factor are a change. Whether it is one of this
# width or of the machine, only new measurements of the other widths can tell.
SURPRISES, SURPRISE = 3, 1.4
LEAST_CONTEXT = 1024


class Place(NamedTuple):
    """Where costs are alike: buckets of requests and of tokens in their contexts."""

    requests: int
    context: int


def place_of(requests: int, context: int) -> Place:
    """Buckets of R requests with `context` committed tokens each: 1, 2, 3, 4, 6, 8, 12, 16, ...
    requests, and powers of two from 1,024 tokens."""
    if requests > 4:
        power = 1 << (requests - 1).bit_length() - 1
        requests = power * 3 // 2 if requests <= power * 3 // 2 else power * 2
    return Place(requests, max(0, math.ceil(math.log2(max(context, 1) / LEAST_CONTEXT))))


class _Costs:
    """Seconds by width in one place, without the common factor. Lists: a step takes in one number,
    for which arrays are slow."""

    def __init__(self, widths: int) -> None:
        self.seconds, self.count = [math.nan] * widths, [0] * widths
        self.first: list[list[float]] = [[] for _ in range(widths)]
        self.surprises: list[float] = []
        # All steps, and their number when a width was last measured.
        self.steps, self.last = 0, [0] * widths

    def measured(self, at: int) -> int:
        """Count a measurement of width number `at`; returns how many there are that still count."""
        self.steps += 1
        if self.steps - self.last[at] > STALE:
            self.forget(at)
        self.last[at] = self.steps
        self.count[at] += 1
        return self.count[at]

    def is_known(self, at: int) -> bool:
        """Whether width number `at` was measured often enough, and not long ago."""
        return self.count[at] >= ENOUGH and self.steps - self.last[at] <= STALE

    def forget(self, at: int) -> None:
        """Width number `at` is to be measured anew."""
        self.count[at], self.first[at] = 0, []

    def has_changed(self, at: int, ratio: float) -> None:
        """Width number `at` costs `ratio` times what was expected, and so may all others.

        If it drafts, plain decoding is to be measured, and other widths that draft are not: that
        would cost more than it tells. If it is plain decoding, they are.
        """
        self.seconds = [seconds * ratio for seconds in self.seconds]
        for other in range(1, len(self.first)) if at == 0 else (0,):
            self.forget(other)


class StepCosts:
    """Costs by place and width. Unknown ones are guessed from the nearest place that has them."""

    def __init__(self, widths: Sequence[int]) -> None:
        """
        Args:
            widths: ascending.
        """
        self._widths = tuple(widths)
        self._places: dict[Place, _Costs] = {}
        self._drift = 1.0

    def record(self, place: Place, width: int, seconds: float) -> bool:
        """Take in one step. Returns whether it shows that costs have changed at once."""
        costs = self._places.setdefault(place, _Costs(len(self._widths)))
        at = bisect_left(self._widths, width)
        count = costs.measured(at)
        if count <= ENOUGH:
            # The first ones may hold allocations: their median.
            costs.first[at].append(seconds / self._drift)
            costs.seconds[at] = statistics.median(costs.first[at])
            return False
        ratio = seconds / (costs.seconds[at] * self._drift)
        if 1 / SURPRISE < ratio < SURPRISE:
            costs.surprises.clear()
        else:
            costs.surprises.append(seconds)
        if len(costs.surprises) == SURPRISES:
            costs.has_changed(at, statistics.median(costs.surprises) / (seconds / ratio))
            costs.surprises.clear()
            return True
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        self._drift *= ratio**DRIFT_WEIGHT
        costs.seconds[at] *= ratio ** max(1 / count, LEAST_WEIGHT)
        return False

    def seconds(self, place: Place) -> NDArray[np.float64]:
        """`[widths]`: seconds of a step; nan for what nothing is known of."""
        costs = self._places.get(place)
        known = np.array(costs.seconds) if costs else np.full(len(self._widths), np.nan)
        if np.isnan(known).any():
            known = self._with_guesses(place, known)
        return known * self._drift

    def _with_guesses(self, place: Place, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Unknown costs in proportion to what the nearest other places have measured."""
        for near in sorted(self._places, key=lambda other: _distance(place, other)):
            other = np.array(self._places[near].seconds)
            both = ~np.isnan(known) & ~np.isnan(other)
            scale = (known[both] / other[both]).mean() if both.any() else 1.0
            known = np.where(np.isnan(known), other * scale, known)
        return known

    def to_measure(self, place: Place, widths: Sequence[int]) -> int | None:
        """One of the widths whose cost is to be measured before anything is decided here, or None.

        In the first place every width is measured; in others once there were some steps.
        """
        costs = self._places.get(place)
        if costs is None:
            return None if self._places else widths[0]
        if costs.steps < SETTLED and place != next(iter(self._places)):
            return None
        unknown = (w for w in widths if not costs.is_known(bisect_left(self._widths, w)))
        return next(unknown, None)

    def report(self) -> list[dict[str, object]]:
        """Milliseconds by place and width; None for what was not measured."""
        return [
            {
                "requests": place.requests,
                "context": LEAST_CONTEXT << place.context,
                "milliseconds": {
                    str(width): None if math.isnan(s) else round(s * self._drift * 1e3, 3)
                    for width, s in zip(self._widths, costs.seconds, strict=True)
                },
                "steps": costs.steps,
            }
            for place, costs in sorted(self._places.items())
        ]


def _distance(a: Place, b: Place) -> float:
    return abs(math.log2(a.requests / b.requests)) + abs(a.context - b.context)
