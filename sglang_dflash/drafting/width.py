"""The number of tokens of a block that the target verifies: the whole block, or as many as pay off.

A step of width w gives each request 1 to w tokens. It costs what a target forward over w tokens per
request costs, and a draft forward if w > 1. Width 1 is plain decoding.

`AdaptiveWidth` takes the width with the most expected tokens per second. Tokens come from how often
drafts survived in earlier steps (`Survival`), seconds from the medians of measured steps
(`StepSeconds`). Measurements of unused widths grow old, so another width is tried for one step now
and then: less often the more a try costs, and the longer no try has changed the choice. No state
is kept per request, and no step waits for the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from statistics import median_low
from typing import Any, NamedTuple

# A draft that was never tried is expected to be accepted this often: a server begins by drafting.
GUESS = 0.8
# Weight of a step of one request in the survival of drafts; a step of R requests weighs sqrt(R)
# times as much. Less: luck is averaged out. More: a change of text is followed faster.
WEIGHT = 0.03
# Weight in the survival of the last few steps, which takes over if it is so many standard
# deviations from the other one: the text has changed.
RECENT_WEIGHT, CHANGE_DEVIATIONS = 0.25, 3.0
# A server's first steps, which take longer and do not count, and the last measurements of a width
# that its median is of.
COLD_STEPS, MEASUREMENTS = 8, 7
# A measurement that is off by this factor is repeated; if the next one agrees, costs have changed.
SURPRISE = 1.4
# Share of the time that tries may lose, and the steps between two at least.
BUDGET, LEAST_STEPS = 0.03, 8
# While tries change nothing the pause doubles, up to this factor.
PATIENCE = 3
# Steps after which a width below the one in use is measured again. Only its cost can have changed:
# its drafts are among those that are verified. Where it never was, that cost is a guess, and
# `LEAST_STEPS` are enough.
STALE_STEPS = 240


class TimedStep(NamedTuple):
    """A step whose duration is known.

    Attributes:
        seconds: from its beginning to that of the next step.
        batch_size: its requests.
        context: committed tokens of the longest one.
        width: tokens of each that the target computed.
    """

    seconds: float
    batch_size: int
    context: int
    width: int


class WidthPolicy:
    """Chooses the width of every step: the whole block. Others derive from it.

    Attributes:
        widths: ascending; the last one is the whole block.
    """

    def __init__(self, verify_block: int) -> None:
        self.widths: tuple[int, ...] = (verify_block,)

    def choose(self, rids: Sequence[Hashable], context: int, most: int, undrafted: int = 0) -> int:
        """The width of the next step.

        Args:
            rids: ids of the requests that take drafts.
            context: committed tokens of the longest request.
            most: tokens that a request can still take, at most.
            undrafted: other requests of the batch, which take one token per step.
        """
        return self.widths[-1]

    def record(self, step: TimedStep) -> None:
        """Take in how long a step took."""

    def observe(self, rids: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        """Take in the outcome of a step of that width: once per step, in the order of the steps.

        Args:
            rids: ids of the requests that took drafts and still run.
            accepted: accepted drafts of each.
        """

    def report(self) -> Mapping[str, Any]:
        """Return the figures that /server_info shows."""
        return {"width": "fixed"}


class Survival:
    """The probability that each draft of a block is accepted, with all before it."""

    def __init__(self, drafts: int) -> None:
        self.probabilities = [GUESS**k for k in range(1, drafts + 1)]
        self._recent_probabilities = list(self.probabilities)
        # Steps that `probabilities` rest on; how far the last ones were from them, in accepted
        # drafts; and the variance of one.
        self._steps_observed, self._recent_error, self._error_variance = 1, 0.0, 1.0

    def expect_change(self) -> None:
        """Expect other drafts to survive, because other requests run: the next step weighs a
        third."""
        self._steps_observed = min(self._steps_observed, 2)

    def observe(self, drafts: int, accepted: Sequence[int]) -> None:
        """Take in a step that verified so many drafts of each request and accepted so many of
        each."""
        requests, ascending = len(accepted), sorted(accepted)
        survived = [1 - bisect_right(ascending, k) / requests for k in range(drafts)]
        self._steps_observed += 1
        weight = min(1.0, max(WEIGHT * sqrt(requests), 1 / self._steps_observed))
        recent_weight = max(weight, RECENT_WEIGHT)
        error = sum(survived) - sum(self.probabilities[:drafts])
        self._recent_error += recent_weight * (error - self._recent_error)
        self._error_variance += WEIGHT * (error * error - self._error_variance)
        _average(self.probabilities, survived, weight)
        _average(self._recent_probabilities, survived, recent_weight)
        # The standard deviation of the mean of the last steps, weighted as here.
        deviation = sqrt(self._error_variance * recent_weight / (2 - recent_weight))
        if abs(self._recent_error) > CHANGE_DEVIATIONS * deviation:
            self.probabilities = list(self._recent_probabilities)
            self._steps_observed, self._recent_error = 4, 0.0


def _average(survival: list[float], survived: Sequence[float], weight: float) -> None:
    """Move to what survived. Drafts that were not verified change as the last one that was."""
    last = len(survived) - 1
    before = survival[last]
    for k, share in enumerate(survived):
        # Away from 0: the next line divides by it.
        survival[k] = max(1e-4, survival[k] + weight * (share - survival[k]))
    for k in range(last + 1, len(survival)):
        survival[k] = max(1e-4, survival[k] * survival[last] / before)


class CostBucket(NamedTuple):
    """A bucket of steps of comparable time: up to 1, 2, 4, 8, ... requests, and less than 2,048,
    8,192, 32,768, ... tokens in the longest context."""

    requests: int
    context: int

    @classmethod
    def of(cls, batch_size: int, context: int) -> CostBucket:
        return cls(max(0, batch_size - 1).bit_length(), (context // 1024).bit_length() // 2)


class StepSeconds:
    """Seconds of a step by width and bucket: medians of the last measurements."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._samples: dict[CostBucket, dict[int, deque[float]]] = {}
        self._medians: dict[CostBucket, dict[int, float]] = {}
        self.measured = Counter[int]()
        # By width, the last measurement over what was expected, if it was a surprise.
        self._last_surprise: dict[int, float] = {}

    def record(self, bucket: CostBucket, width: int, seconds: float) -> bool:
        """Record a measurement, and return whether to repeat it because it is a surprise."""
        ratio = seconds / self.at(bucket).get(width, seconds)
        is_surprise = not _alike(ratio, 1.0)
        is_change = is_surprise and _alike(ratio, self._last_surprise.get(width, 0.0))
        self._last_surprise[width] = ratio if is_surprise else 0.0
        if is_change:
            # What was measured before is outdated, in other places too.
            for at, medians in self._medians.items():
                medians.pop(width, None)
                self._samples[at].pop(width, None)
        samples = self._samples.setdefault(bucket, {}).setdefault(width, deque(maxlen=MEASUREMENTS))
        samples.append(seconds)
        self._medians.setdefault(bucket, {})[width] = median_low(samples)
        self.measured[width] += 1
        return is_surprise

    def at(self, bucket: CostBucket) -> Mapping[int, float]:
        """Return the seconds of a step by width. Widths without a measurement here are scaled from
        the nearest bucket with one, and left out if there is none."""
        by_width = self._medians.get(bucket, {})
        if len(by_width) == len(self._widths):
            return by_width
        for near in sorted(self._medians, key=lambda other: _distance(bucket, other)):
            medians = self._medians[near]
            shared = by_width.keys() & medians.keys()
            ratios = [by_width[width] / medians[width] for width in shared]
            scale = sum(ratios) / len(ratios) if ratios else 1.0
            by_width = {width: scale * seconds for width, seconds in medians.items()} | by_width
        return by_width

    def measured_widths(self, bucket: CostBucket) -> Collection[int]:
        """The widths that were measured there."""
        return self._medians.get(bucket, {}).keys()

    def report(self) -> list[dict[str, object]]:
        """Milliseconds by bucket and width; None for what was not measured."""
        return [
            {
                "requests": 1 << bucket.requests,
                "context": 2048 << 2 * bucket.context,
                "milliseconds": {
                    str(width): round(medians[width] * 1e3, 3) if width in medians else None
                    for width in self._widths
                },
            }
            for bucket, medians in sorted(self._medians.items())
            if medians
        ]


def _alike(a: float, b: float) -> bool:
    return a < SURPRISE * b and b < SURPRISE * a


def _distance(a: CostBucket, b: CostBucket) -> int:
    return abs(a.requests - b.requests) + abs(a.context - b.context)


class _Chosen(NamedTuple):
    """A step whose outcome is not known yet.

    Attributes:
        break_even: accepted drafts per request from which on it is faster than plain decoding.
        is_probe: whether it drafts although drafting does not seem to pay.
    """

    width: int
    break_even: float = 0.0
    is_probe: bool = False


class AdaptiveWidth(WidthPolicy):
    """The width with the most expected tokens per second."""

    def __init__(self, widths: Sequence[int]) -> None:
        """
        Args:
            widths: ascending; the first is 1, the last the block size.

        Raises:
            ValueError: they are not.
        """
        self.widths = tuple(widths)
        if len(widths) < 2 or widths[0] != 1 or list(widths) != sorted(set(widths)):
            raise ValueError(f"widths {widths}: ascending numbers from 1 to the block size")
        self._survival, self._step_seconds = Survival(widths[-1] - 1), StepSeconds(widths)
        self._best_width, self._pause_factor = self.widths[-1], 1.0
        # Steps since each width was used, and the one to repeat, or 0.
        self._steps_since_use, self._width_to_repeat = dict.fromkeys(self.widths, 0), 0
        # Steps that were to measure a width since one could be timed.
        self._untimed_steps = 0
        self._cold_steps = COLD_STEPS
        # Requests of the last step that drafted; steps without an outcome yet, two under overlap.
        self._last_rids: frozenset[Hashable] = frozenset()
        self._undecided: deque[_Chosen] = deque(maxlen=4)
        self._probe_steps = 0
        self._total_seconds, self._probe_seconds = 0.0, 0.0

    def choose(self, rids: Sequence[Hashable], context: int, most: int, undrafted: int = 0) -> int:
        step = _Chosen(1)
        if rids and most > 1:
            bucket = CostBucket.of(len(rids) + undrafted, context)
            step = self._decide(rids, undrafted, bucket, most)
        self._undecided.append(step)
        self._probe_steps += step.is_probe
        for width in self.widths:
            self._steps_since_use[width] += 1
        self._steps_since_use[step.width] = 0
        return step.width

    def _decide(
        self, rids: Sequence[Hashable], undrafted: int, bucket: CostBucket, most: int
    ) -> _Chosen:
        unmeasured, seconds = self._take_width_to_measure(), self._step_seconds.at(bucket)
        if unmeasured is not None:
            return _Chosen(unmeasured)
        batch_size = len(rids) + undrafted
        survivors = (len(rids) * survival for survival in self._survival.probabilities)
        tokens = list(accumulate(survivors, initial=float(batch_size)))
        # The last tokens of an answer say nothing of the steps to come.
        lasting = max(self.widths, key=lambda width: tokens[width - 1] / seconds[width])
        if lasting != self._best_width:
            self._best_width, self._pause_factor = lasting, 1.0
        rate = {width: tokens[min(width, most) - 1] / seconds[width] for width in self.widths}
        best = max(rate, key=rate.__getitem__)
        still_running = self._last_rids.intersection(rids)
        if self._last_rids and 2 * len(still_running) < len(rids):
            self._last_rids, self._pause_factor = frozenset(), 1.0
            self._survival.expect_change()
        measured = self._step_seconds.measured_widths(bucket)
        width = self._take_width_to_try(best, rate, seconds, measured)
        if width is None:
            return _Chosen(best)
        break_even = batch_size / len(rids) * (seconds[width] / seconds[1] - 1)
        return _Chosen(width, break_even, is_probe=best == 1 and width > 1)

    def _take_width_to_measure(self) -> int | None:
        """Return the width that this step uses while not all are measured; None if they are.

        Not for ever: a step that a prefill follows is not timed. Then it is as with a fixed width.
        """
        measured = self._step_seconds.measured
        least = min(self.widths, key=measured.__getitem__)
        if measured[least] >= MEASUREMENTS // 2:
            return None
        self._untimed_steps += 1
        if self._cold_steps or self._untimed_steps > len(self.widths) * MEASUREMENTS:
            return self._best_width
        return least

    def _take_width_to_try(
        self,
        best: int,
        rate: Mapping[int, float],
        seconds: Mapping[int, float],
        measured: Collection[int],
    ) -> int | None:
        """Return a width other than the best for this step alone, if one is due.

        `measured`: the widths whose seconds were measured with as many requests.
        """
        repeated, self._width_to_repeat = self._width_to_repeat, 0
        if repeated and repeated != best:
            return repeated
        wider = [width for width in rate if width > best]
        if wider:
            width = max(wider, key=rate.__getitem__)
            # The time that the try loses, in steps of the best width.
            lost = (1 - rate[width] / rate[best]) * seconds[width] / seconds[best]
            age = min(self._steps_since_use[each] for each in self.widths if each > best)
            if age >= self._pause_factor * max(LEAST_STEPS, lost / BUDGET):
                self._pause_factor = min(PATIENCE, 2 * self._pause_factor)
                return width
        pause = {w: STALE_STEPS if w in measured else LEAST_STEPS for w in rate if w < best}
        return next((w for w in pause if self._steps_since_use[w] >= pause[w]), None)

    def record(self, step: TimedStep) -> None:
        self._untimed_steps = 0
        self._total_seconds += step.seconds
        if self._best_width == 1 and step.width > 1:
            self._probe_seconds += step.seconds
        if self._cold_steps:
            self._cold_steps -= 1
            return
        bucket = CostBucket.of(step.batch_size, step.context)
        if self._step_seconds.record(bucket, step.width, step.seconds):
            self._width_to_repeat = step.width

    def observe(self, rids: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        # A step that failed has no outcome: its choice must not be taken for a later one's.
        while self._undecided and self._undecided[0].width != width:
            self._undecided.popleft()
        step = self._undecided.popleft() if self._undecided else _Chosen(width)
        if width == 1 or not rids:
            return
        self._survival.observe(width - 1, accepted)
        self._last_rids = frozenset(rids)
        if step.is_probe and sum(accepted) >= step.break_even * len(rids):
            self._width_to_repeat, self._pause_factor = width, 1.0

    def report(self) -> Mapping[str, Any]:
        share = self._probe_seconds / self._total_seconds if self._total_seconds else 0.0
        return {
            "width": "adaptive",
            "width_now": self._best_width,
            "width_probes": self._probe_steps,
            "width_probe_share": round(share, 4),
            "width_costs": self._step_seconds.report(),
        }
