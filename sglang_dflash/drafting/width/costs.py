"""What a decode step costs at each width, from measured steps."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Measurements of a width before its cost counts as known, and a server's first steps, which do not
# count: they take longer.
ENOUGH, COLD = 3, 8
# A width is measured again if its last measurement is older than `each` steps for each measurement
# that counts, or than `most` steps: (each, most). Plain decoding, which all others are compared
# with, and drafts.
STALE_PLAIN, STALE = (8, 96), (40, 1000)
# Steps in one place after which widths that were only guessed there are measured.
SETTLED = 32
# Steps that are to measure one width before it is given up. A step that a prefill follows is not
# timed, and with short answers that may be every step.
PATIENCE = 16
# A measurement weighs at least this much. What all widths have in common (other processes, clock
# rates) is followed faster, as one factor.
LEAST_WEIGHT, DRIFT_WEIGHT = 0.05, 0.1
# A measurement counts as at most so many times what was expected: steps that a collection of
# garbage or another process has delayed are no cost of a width.
OUTLIER = 2.0
# So many measurements of a width in a row that are off by this factor are a change.
SURPRISES, SURPRISE = 2, 1.4
LEAST_CONTEXT = 1024
# Doublings of requests or context up to which places have costs of one size.
NEIGHBOR = 1.0


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
    return Place(requests, max(0, (context - 1) // LEAST_CONTEXT).bit_length())


@dataclass
class _Cost:
    """The cost of one width in one place.

    Attributes:
        seconds: without the common factor.
        count: measurements that still count.
        first: the first ones of them.
        surprises: the newest measurements, if they are not as expected.
        last: number of the step in this place that measured it last.
        usual: number of the last step that was as expected.
        asked: steps that were to measure it since anything was measured in this place.
    """

    seconds: float = math.nan
    count: int = 0
    first: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    last: int = 0
    usual: int = 0
    asked: int = 0

    def forget(self, kept: int = 0) -> None:
        """It is to be measured anew, as if there had been `kept` measurements."""
        self.count, self.first, self.surprises = kept, [], []


class _Costs:
    """Costs by width in one place. No arrays: a step takes in one number."""

    def __init__(self, widths: int) -> None:
        self.of, self.steps = [_Cost() for _ in range(widths)], 0

    def measured(self, at: int) -> _Cost:
        """Count a measurement of width number `at`."""
        cost = self.of[at]
        self.steps += 1
        for each in self.of:
            each.asked = 0
        if self.steps - cost.last > STALE[1]:
            cost.forget()
        cost.last = self.steps
        cost.count += 1
        return cost

    def is_known(self, at: int) -> bool:
        """Whether width number `at` was measured often enough, not long ago, and cost what was
        expected."""
        cost = self.of[at]
        each, most = STALE if at else STALE_PLAIN
        is_fresh = self.steps - cost.last <= min(each * cost.count, most)
        return cost.count >= ENOUGH and is_fresh and not cost.surprises

    def has_changed(self, at: int, ratio: float) -> None:
        """Width number `at` costs `ratio` times what was expected, time and again. So may others
        that were not as expected more lately than this one.

        Plain decoding is then to be measured, and a width that drafts once more. Other widths that
        draft are not, since that would cost more than it tells. If it is plain decoding that has
        changed, they are.
        """
        cost = self.of[at]
        plain = self.of[0]
        # This one is among them.
        changed = [each for each in self.of if each.usual <= cost.usual or each.surprises]
        for each in changed:
            each.seconds *= ratio
            if cost is plain or each is plain:
                each.forget()
        is_alone = cost is plain or plain not in changed
        cost.forget(kept=ENOUGH if is_alone else ENOUGH - 1)
        cost.usual = self.steps


class StepCosts:
    """Costs by place and width. Unknown ones are guessed from the nearest place that has them."""

    def __init__(self, widths: Sequence[int]) -> None:
        """
        Args:
            widths: ascending.
        """
        self._widths = tuple(widths)
        self._places: dict[Place, _Costs] = {}
        self._drift, self._steps, self._is_complete = 1.0, 0, False

    def record(self, place: Place, width: int, seconds: float) -> bool:
        """Take in one step. Returns whether costs have changed suddenly."""
        costs = self._costs_in(place)
        at = bisect_left(self._widths, width)
        cost = costs.measured(at)
        self._steps += 1
        if cost.count <= ENOUGH:
            # The first ones may hold allocations: their median.
            cost.first.append(seconds / self._drift)
            cost.seconds, cost.usual = statistics.median(cost.first), costs.steps
            if self._steps <= COLD:
                cost.forget()
            return False
        ratio = seconds / (cost.seconds * self._drift)
        if 1 / SURPRISE < ratio < SURPRISE:
            cost.surprises, cost.usual = [], costs.steps
        else:
            cost.surprises.append(seconds)
        if len(cost.surprises) == SURPRISES:
            costs.has_changed(at, statistics.median(cost.surprises) / (seconds / ratio))
            return True
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        self._drift *= ratio**DRIFT_WEIGHT
        cost.seconds *= ratio ** max(1 / cost.count, LEAST_WEIGHT)
        return False

    def _costs_in(self, place: Place) -> _Costs:
        if place not in self._places:
            self._places[place] = _Costs(len(self._widths))
        return self._places[place]

    def seconds(self, place: Place) -> NDArray[np.float64]:
        """`[widths]`: seconds of a step; nan for what nothing is known of."""
        costs = self._places.get(place)
        known = _array(costs) if costs else np.full(len(self._widths), np.nan)
        if math.isnan(known.sum()):
            known = self._with_guesses(place, known)
        return known * self._drift

    def _with_guesses(self, place: Place, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Unknown costs in proportion to what the nearest other places have measured, or as in a
        neighbor. A place far off without a width in common tells nothing: its steps have another
        size."""
        for near in sorted(self._places, key=lambda other: _distance(place, other)):
            other = _array(self._places[near])
            both = ~np.isnan(known) & ~np.isnan(other)
            is_blank = np.isnan(known).all()
            if both.any() or is_blank or _distance(place, near) <= NEIGHBOR:
                scale = (known[both] / other[both]).mean() if both.any() else 1.0
                known = np.where(np.isnan(known), other * scale, known)
        return known

    def to_measure(self, place: Place, widths: Sequence[int]) -> int | None:
        """One of the widths whose cost is to be measured before anything is decided here, or None.

        As long as there is no place in which every width was measured, they are measured wherever
        steps are. In other places they are once there were some steps. A width that could not be
        measured in many steps is given up.
        """
        costs = self._costs_in(place)
        if costs.steps < SETTLED:
            self._is_complete = self._is_complete or any(
                all(cost.count >= ENOUGH for cost in other.of) for other in self._places.values()
            )
            if self._is_complete:
                return None
        for width in widths:
            at = bisect_left(self._widths, width)
            if not costs.is_known(at) and costs.of[at].asked < PATIENCE:
                costs.of[at].asked += 1
                return width
        return None

    def may_be_cheaper(self, place: Place, widths: Sequence[int]) -> bool:
        """Whether the last measurement of one of the widths was much less than expected."""
        if place not in self._places:
            return False
        of = self._places[place].of
        costs = [of[bisect_left(self._widths, width)] for width in widths]
        return any(
            c.surprises and c.surprises[-1] < c.seconds * self._drift and c.asked < PATIENCE
            for c in costs
        )

    def report(self) -> list[dict[str, object]]:
        """Milliseconds by place and width; None for what was not measured."""
        return [
            {
                "requests": place.requests,
                "context": LEAST_CONTEXT << place.context,
                "milliseconds": {
                    str(width): None if math.isnan(s) else round(s * self._drift * 1e3, 3)
                    for width, s in zip(self._widths, _array(costs).tolist(), strict=True)
                },
                "steps": costs.steps,
            }
            for place, costs in sorted(self._places.items())
            if costs.steps
        ]


def _array(costs: _Costs) -> NDArray[np.float64]:
    return np.array([cost.seconds for cost in costs.of])


def _distance(a: Place, b: Place) -> float:
    return abs(math.log2(a.requests / b.requests)) + abs(a.context - b.context)
