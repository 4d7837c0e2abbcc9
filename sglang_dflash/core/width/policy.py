"""Which verify width serves fastest.

A step of width w gives each request 1 to w tokens and costs what a target forward over w tokens per
request costs, and a draft forward if w > 1. Width 1 is plain decoding. The policy takes the width
with the most expected tokens per second. Expectations come from the outcomes of earlier steps
(`Survival`), costs from their duration (`StepCosts`); no step waits for the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from sglang_dflash.core.width.costs import Place, StepCosts, place_of
from sglang_dflash.core.width.survival import Survival

# Another width is taken if it promises this much more than the one in use, ...
ENTER = 1.03
# ... and drafting is given up if it promises less than this of plain decoding. Estimates of one
# request are noisy: a bound above 1 gives up drafts that pay (tests/core/test_width.py).
KEEP = 0.98
# While nothing is drafted, everything is decided anew every so many steps, probes included.
REST = 8
# Share of the time that probes may take while nothing is drafted, and the steps between them.
EXPLORE = 0.01
LEAST_STEPS, MOST_STEPS = 16, 96
# A batch of which this share was never drafted is probed early: a single step tells much of new
# text, and short answers end before the next probe. But only if such probes are of use: if at least
# this share of them paid for themselves, the last one counting with this weight.
UNKNOWN, USEFUL, USEFUL_WEIGHT = 0.5, 0.1, 0.3
# What a probe hopes for: drafts that are accepted this often.
HOPE = 0.9


class WidthPolicy(Protocol):
    """Chooses the width of every step.

    Attributes:
        widths: ascending; the last one is the block size.
        drafts: whether steps draft, apart from probes.
    """

    widths: tuple[int, ...]

    @property
    def drafts(self) -> bool: ...

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        """The width of the next step.

        Args:
            requests: those that take drafts.
            context: committed tokens of the longest request.
            most: tokens that a request can still take, at most.
            undrafted: other requests of the batch, which take one token per step.
        """

    def took(self, seconds: float, requests: int, context: int, width: int) -> None:
        """A step of that many requests had this duration."""

    def observe(self, requests: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        """Outcome of a step: accepted drafts of each request that took drafts and still runs.

        Called once per step, in their order.
        """

    def report(self) -> Mapping[str, Any]:
        """For /server_info."""


class FixedWidth:
    """Every step verifies the whole block."""

    drafts = True

    def __init__(self, block_size: int) -> None:
        self.widths: tuple[int, ...] = (block_size,)

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        return self.widths[0]

    def took(self, seconds: float, requests: int, context: int, width: int) -> None:
        pass

    def observe(self, requests: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        pass

    def report(self) -> Mapping[str, Any]:
        return {"width": "fixed"}


class _Chosen(NamedTuple):
    """What is remembered of a step until its outcome is known.

    Attributes:
        expected: drafts that were expected to be accepted.
        pays: of a probe of new requests, the accepted drafts from which on it pays; else None.
    """

    expected: float = 0.0
    pays: float | None = None


@dataclass
class _Figures:
    """What is reported. `expected` and `accepted` are drafts, of steps that had any."""

    steps: Counter[int] = field(default_factory=Counter)
    probes: int = 0
    switches: int = 0
    expected: float = 0.0
    accepted: int = 0
    seconds: float = 0.0
    probe_seconds: float = 0.0


class AdaptiveWidth:
    """The width with the most expected tokens per second, with hysteresis and probes."""

    def __init__(self, widths: Sequence[int]) -> None:
        """
        Args:
            widths: ascending; the first is 1, the last the block size.

        Raises:
            ValueError: they are not.
        """
        self.widths = tuple(widths)
        if len(self.widths) < 2 or self.widths[0] != 1 or list(widths) != sorted(set(widths)):
            raise ValueError(f"widths {widths}: ascending numbers from 1 to the block size")
        self._columns = np.array(self.widths) - 1
        self._survival, self._costs = Survival(self.widths[-1] - 1), StepCosts(widths)
        self._current = self.widths[-1]
        self._tokens = np.ones(self.widths[-1])
        self._idle_steps = 0
        self._probe_now = False
        # Of steps whose outcome is not known yet: two under overlap.
        self._chosen: deque[_Chosen] = deque(maxlen=4)
        self._settled: tuple[object, ...] = ()
        # How often probes of new requests have paid.
        self._useful = 0.5
        self._figures = _Figures()

    @property
    def drafts(self) -> bool:
        return self._current > 1

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        allowed = self.widths[: max(1, bisect_right(self.widths, most))] if requests else (1,)
        place = place_of(max(1, len(requests) + undrafted), context)
        chosen = _Chosen()
        if len(allowed) == 1 or self._rests((requests, place, allowed)):
            width = 1
        else:
            width = self._best(requests, place, allowed, undrafted)
            if width == 1:
                width, pays = self._probe(requests, place, allowed, undrafted)
                chosen = _Chosen(pays=pays)
            if width > 1:
                expected = float(self._tokens[width - 1]) - len(requests)
                chosen = chosen._replace(expected=expected)
        self._idle_steps = self._idle_steps + 1 if width == 1 else 0
        self._chosen.append(chosen)
        self._figures.steps[width] += 1
        return width

    def _rests(self, situation: tuple[object, ...]) -> bool:
        """Whether the last decision, to draft nothing, stands: nothing was learned since."""
        stands = not self.drafts and situation == self._settled and not self._probe_now
        self._settled = situation
        return stands and self._idle_steps % REST > 0

    def _best(
        self,
        requests: Sequence[Hashable],
        place: Place,
        allowed: Sequence[int],
        undrafted: int,
    ) -> int:
        """The width to stay at. A limit by the end of requests changes it for this step only."""
        self._tokens = self._survival.tokens(self._survival.rows(requests)).sum(0)
        # While nothing is drafted, it is up to probes to measure.
        unknown = self._costs.to_measure(place, allowed) if self.drafts else None
        if unknown is not None:
            return unknown
        tokens = self._tokens[self._columns[: len(allowed)]] + undrafted
        rate = dict(zip(allowed, tokens / self._costs.seconds(place)[: len(allowed)], strict=True))
        best = max(allowed, key=rate.__getitem__)
        current = min(self._current, allowed[-1])
        if current > 1 and rate[current] < KEEP * rate[1]:
            # To the best width that pays, if there is one.
            width = best if rate[best] >= ENTER * rate[1] else 1
        else:
            width = best if rate[best] >= ENTER * rate[current] else current
        if width != current and allowed == self.widths:
            self._current = width
            self._figures.switches += 1
        return width

    def _probe(
        self,
        requests: Sequence[Hashable],
        place: Place,
        allowed: Sequence[int],
        undrafted: int,
    ) -> tuple[int, float | None]:
        """1, or now and then a width to find out whether drafts have become better, or what they
        cost; and `pays` of `_Chosen`."""
        seconds = self._costs.seconds(place)[: len(allowed)]
        hoped = (1 - HOPE ** (self._columns[: len(allowed)] + 1)) / (1 - HOPE)
        at = int(((len(requests) * hoped + undrafted) / seconds).argmax())
        if at == 0:
            return 1, None
        between = (seconds[at] / seconds[0] - 1) / EXPLORE
        is_due = self._probe_now or self._idle_steps >= min(max(between, LEAST_STEPS), MOST_STEPS)
        is_new = self._survival.share_unknown(requests) > UNKNOWN
        is_early = is_new and self._useful >= USEFUL and self._idle_steps >= LEAST_STEPS
        if not (is_due or is_early):
            return 1, None
        self._probe_now = False
        self._figures.probes += 1
        unknown = self._costs.to_measure(place, allowed[1:])
        if unknown is not None:
            return unknown, None
        pays = (len(requests) + undrafted) * (float(seconds[at] / seconds[0]) - 1)
        return allowed[at], pays if is_new else None

    def took(self, seconds: float, requests: int, context: int, width: int) -> None:
        self._costs.record(place_of(max(1, requests), context), width, seconds)
        self._figures.seconds += seconds
        self._figures.probe_seconds += seconds * (width > 1 and not self.drafts)

    def observe(self, requests: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        chosen = self._chosen.popleft() if self._chosen else _Chosen()
        if width == 1:
            self._survival.undrafted(requests)
        if width == 1 or not requests:
            return
        total = sum(accepted)
        self._figures.expected += chosen.expected
        self._figures.accepted += total
        if chosen.pays is not None:
            self._useful += USEFUL_WEIGHT * ((total >= chosen.pays) - self._useful)
        # A probe that found better drafts than expected is repeated at once: one step says little.
        self._probe_now = not self.drafts and total > max(chosen.expected, len(requests))
        self._settled = ()
        rows = self._survival.rows(requests)
        self._survival.observe(rows, width - 1, np.array(accepted, dtype=np.int64))

    def report(self) -> Mapping[str, Any]:
        f = self._figures
        share = f.probe_seconds / f.seconds if f.seconds else 0.0
        return {
            "width": "adaptive",
            "width_now": self._current,
            "width_steps": {str(width): f.steps[width] for width in self.widths},
            "width_switches": f.switches,
            "width_probes": f.probes,
            "width_probe_share": round(share, 4),
            "width_drafts_expected": round(f.expected, 1),
            "width_drafts_accepted": f.accepted,
            "width_costs": self._costs.report(),
        }
