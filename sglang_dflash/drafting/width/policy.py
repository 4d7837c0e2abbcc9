"""Which verify width serves fastest.

A step of width w gives each request 1 to w tokens and costs what a target forward over w tokens per
request costs, and a draft forward if w > 1. Width 1 is plain decoding. The policy takes the width
with the most expected tokens per second. Expectations come from the outcomes of earlier steps
(`Survival`), costs from their duration (`StepCosts`); no step waits for the device.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.drafting.width.costs import Place, StepCosts, place_of
from sglang_dflash.drafting.width.survival import Survival

# Another width is taken if it promises this much more than the one in use, ...
ENTER = 1.03
# ... and drafting is given up if it promises less than this of plain decoding. Estimates of one
# request are noisy: a bound above 1 gives up drafts that pay (tests/drafting/test_width.py).
KEEP = 0.98
# A decision, which takes longer than all else here, stands for so many steps at most. Not to draft
# stands longer: plain steps teach nothing about drafts.
REST, REST_PLAIN = 12, 32
# It falls early if drafts lost this share of what they cost: as much as one step loses in which
# hardly any was accepted.
LOST = 0.9
# Share of the time that probes may take while nothing is drafted, and the steps between them.
# Before more than MOST_STEPS go by, they may take MOST_EXPLORE.
EXPLORE, MOST_EXPLORE = 0.01, 0.02
LEAST_STEPS, MOST_STEPS = 16, 96
# Steps between probes if by its cost no width could pay. The cost may have become less.
HOPELESS_STEPS = 1500
# These steps are stretched by a random factor up to this: requests of another kind that come in a
# rhythm would be missed by each probe.
JITTER = 0.2
# A batch of which this share was never drafted is probed early, up to this share of the time: a
# single step tells much of new text, and short answers end before the next probe. But only if such
# probes are of use: if at least this share of them paid for themselves, the last one counting with
# this weight. It begins with a guess.
UNKNOWN, EXPLORE_UNKNOWN = 0.5, 0.05
USEFUL, USEFUL_WEIGHT, USEFUL_GUESS = 0.06, 0.15, 0.25
# A probe is repeated, so many times at most, if it got this share of the accepted drafts that would
# have made it pay.
PROMISING, REPEATS = 0.7, 2
# Decisions in a row that the end of requests has limited, after which all requests count as short:
# what is chosen under a limit stays.
LIMITED = 8
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


class _Decision(NamedTuple):
    """How a step is run, and what is remembered of it until its outcome is known.

    Attributes:
        expected: drafts that are expected to be accepted.
        pays: accepted drafts from which on the step is faster than plain decoding.
        is_probe: whether it is to find out what drafts are worth.
        is_new: whether most of a probe's requests were never drafted.
        requests: that take drafts.
    """

    width: int = 1
    expected: float = 0.0
    pays: float = 0.0
    is_probe: bool = False
    is_new: bool = False
    requests: int = 1


_PLAIN = _Decision()

# What a decision is made for: requests, place, and widths that they can take.
_Situation = tuple[Sequence[Hashable], Place | None, Sequence[int]]
_NOWHERE: _Situation = ((), None, ())


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
        # Tokens of a step whose drafts are as good as a probe hopes, by width.
        self._hoped = (1 - HOPE ** (self._columns + 1)) / (1 - HOPE)
        self._survival, self._costs = Survival(self.widths[-1] - 1), StepCosts(widths)
        self._current = self.widths[-1]
        self._idle_steps = 0
        # Whether to probe at once, probes in a row that nearly paid, and the steps without drafts
        # after which the next one is due.
        self._probe_now, self._repeats, self._probe_at = False, 0, 0.0
        # Whether costs have changed suddenly since drafting was last decided on.
        self._is_repriced = False
        self._random, self._stretch = random.Random(0), 1.0
        # The last decision, what it was made for, the steps since, and what they gained over plain
        # decoding, in drafts.
        self._decision, self._situation = _PLAIN, _NOWHERE
        self._steps_alike, self._gain = 0, 0.0
        # Of steps whose outcome is not known yet: two under overlap.
        self._open: deque[_Decision] = deque(maxlen=4)
        # Decisions in a row that were limited by the end of requests.
        self._limited = 0
        # How often probes of new requests have paid.
        self._useful = USEFUL_GUESS
        self._figures = _Figures()

    @property
    def drafts(self) -> bool:
        return self._current > 1

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        allowed = self.widths[: max(1, bisect_right(self.widths, most))] if requests else (1,)
        place = place_of(max(1, len(requests) + undrafted), context)
        if len(allowed) == 1:
            step = _PLAIN
        elif self._stands((requests, place, allowed)):
            step = self._decision
        else:
            step = self._decide(requests, place, allowed, undrafted)
            # A probe is a single step.
            self._decision = _PLAIN if step.is_probe else step
        self._idle_steps = self._idle_steps + 1 if step.width == 1 else 0
        self._open.append(step)
        self._figures.steps[step.width] += 1
        return step.width

    def _stands(self, situation: _Situation) -> bool:
        """Whether the last decision does. It may, if the end of requests only rules out widths that
        it did not choose."""
        self._steps_alike += 1
        before, self._situation = self._situation, situation
        width, allowed = self._decision.width, situation[2]
        is_same = situation[:2] == before[:2] and width <= allowed[-1] <= before[2][-1]
        pays = self._decision.pays
        has_lost = width > 1 and pays > 0 and self._gain <= -LOST * pays
        stands = is_same and not (has_lost or self._probe_now)
        if width > 1:
            return stands and self._steps_alike < REST
        return stands and self._steps_alike < REST_PLAIN and self._idle_steps < self._probe_at

    def _decide(
        self, requests: Sequence[Hashable], place: Place, allowed: Sequence[int], undrafted: int
    ) -> _Decision:
        self._steps_alike, self._gain = 0, 0.0
        again, self._probe_now = self._probe_now, False
        tokens = self._survival.tokens(self._survival.rows(requests)).sum(0)
        tokens = tokens[self._columns[: len(allowed)]] + undrafted
        # While nothing is drafted, it is up to probes to measure.
        width = self._costs.to_measure(place, allowed) if self.drafts else None
        if width is not None:
            # For one step.
            self._situation = _NOWHERE
            expected = float(tokens[allowed.index(width)] - tokens[0])
            return _Decision(width, expected, requests=len(requests))
        seconds = self._costs.seconds(place)[: len(allowed)]
        if np.isnan(seconds).any():
            # No step like this one could be timed: as with a fixed width.
            return _Decision(min(self._current, allowed[-1]), requests=len(requests))
        self._limited = self._limited + 1 if tuple(allowed) != self.widths else 0
        drafted = self.drafts
        is_repriced, self._is_repriced = self._is_repriced, False
        width, is_probe, is_new = self._best(tokens / seconds, allowed), False, False
        if width == 1:
            gain = (len(requests) * self._hoped[: len(allowed)] + undrafted) / seconds
            hoped = int(gain.argmax())
            is_new = self._survival.share_unknown(requests) > UNKNOWN
            # Drafting is given up after a second look, unless it is for its cost.
            is_given_up = drafted and not (self.drafts or is_repriced)
            is_due = self._probe_is_due(hoped, seconds, is_new)
            cheaper = self._costs.may_be_cheaper(place, allowed[1:])
            is_probe = again or is_given_up or is_due or cheaper
            if is_probe:
                self._stretch = 1 + JITTER * self._random.uniform(-1, 1)
                self._figures.probes += 1
                width = self._costs.to_measure(place, allowed[1:]) or allowed[hoped or 1]
        at = allowed.index(width)
        pays = tokens[0] * (seconds[at] / seconds[0] - 1)
        expected = float(tokens[at] - tokens[0])
        return _Decision(width, expected, float(pays), is_probe, is_new, len(requests))

    def _best(self, rates: NDArray[np.float64], allowed: Sequence[int]) -> int:
        """The width to stay at. A limit by the end of requests changes it for this step only, if
        there is not always one."""
        rate = dict(zip(allowed, rates.tolist(), strict=True))
        best = max(allowed, key=rate.__getitem__)
        current = min(self._current, allowed[-1])
        if current > 1 and rate[current] < KEEP * rate[1]:
            # To the best width that pays, if there is one.
            width = best if rate[best] >= ENTER * rate[1] else 1
        else:
            width = best if rate[best] >= ENTER * rate[current] else current
        if width != current and (not self._limited or self._limited > LIMITED):
            self._current = width
            self._figures.switches += 1
        return width

    def _probe_is_due(self, hoped: int, seconds: NDArray[np.float64], is_new: bool) -> bool:
        """Whether drafts are tried: they may have become better.

        Args:
            hoped: number of the width that is fastest if drafts are as good as hoped.
            seconds: of each width.
            is_new: whether most requests were never drafted.
        """
        between: float = HOPELESS_STEPS
        if hoped:
            steps_lost = seconds[hoped] / seconds[0] - 1
            most_steps = max(MOST_STEPS, steps_lost / MOST_EXPLORE)
            share = EXPLORE_UNKNOWN if is_new and self._useful >= USEFUL else EXPLORE
            between = min(max(steps_lost / share, LEAST_STEPS), most_steps)
        self._probe_at = between * self._stretch
        return self._idle_steps >= self._probe_at

    def took(self, seconds: float, requests: int, context: int, width: int) -> None:
        if self._costs.record(place_of(max(1, requests), context), width, seconds):
            self._situation, self._is_repriced = _NOWHERE, True
        self._figures.seconds += seconds
        self._figures.probe_seconds += seconds * (width > 1 and not self.drafts)

    def observe(self, requests: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        step = self._open.popleft() if self._open else _PLAIN
        self._survival.observe(requests, width - 1, accepted)
        if width == 1 or not requests:
            return
        # Some may have ended before this step, which overlap scheduling had begun by then.
        share = len(requests) / max(1, step.requests)
        total, pays = sum(accepted), share * step.pays
        self._figures.expected += share * step.expected
        self._figures.accepted += total
        self._gain += total - pays
        if step.is_probe:
            self._situation = _NOWHERE
            # One step says little: a probe that pays is repeated at once.
            nearly = PROMISING * pays <= total < pays
            self._repeats = self._repeats + 1 if nearly else 0
            self._probe_now = total >= pays or 0 < self._repeats <= REPEATS
        if step.is_new:
            self._useful += USEFUL_WEIGHT * ((total >= pays) - self._useful)

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
