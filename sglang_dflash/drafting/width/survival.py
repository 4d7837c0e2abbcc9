"""How likely a draft survives verification, by request and by its position in the block.

Learned from outcomes only. A step of width w that accepts a < w - 1 drafts shows a drafts that were
accepted and one that was not; what came after that one is unknown (censored). A request's own rates
leave it out. All requests' rates count it, at half weight, as what this request is expected to do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Weight of earlier steps at each new one: of rates (a hundred steps count), and of the level lately
# of a request (six) and of all requests (five).
REMEMBER, REMEMBER_LATELY, REMEMBER_ALL_LATELY = 0.99, 0.85, 0.8
# A step counts as at most so many requests in all requests' counts, so that a large batch is not
# remembered for long when a small one follows.
MOST_AT_ONCE = 4
# The same for a step in which nothing was drafted: what was known grows old.
REMEMBER_UNSEEN = 0.98
# Standard deviations between a request's level lately and before at which its text has changed.
CHANGE = 2.5
# Tries that are left of a request's counts then: the next steps decide.
AFTER_CHANGE = 4.0
# A draft that was never tried counts as accepted this often, with the weight of so many tries. So
# a server begins by drafting, and a few batches decide whether it goes on.
FIRST_GUESS, GUESS_WEIGHT = 0.8, 4.0
# Tries that a request's level is worth against its own rate at one position, and that the mean over
# positions is worth against all requests' rate at one.
SHRINK_POSITION, SHRINK_ALL = 30.0, 1.0
# Tries that all requests' rates are worth against a request's own level, at least and at most (see
# _Spread), and against the level of the last steps.
SHRINK_REQUEST, SHRINK_LATELY = (1.0, 40.0), (1.5, 3.0)
# Weight, in all requests' counts, of a draft that comes after a rejected one: it counts as expected
# of the request. Without it the first position alone would follow a change to text of which nothing
# is accepted, and each new request would look worth drafting.
UNREACHED = 0.5
# Estimates stay away from 0 and 1 by this much.
MARGIN = 0.01
# Requests that are remembered. Beyond it, those outside the running batch are forgotten.
MOST_REQUESTS = 4096


class _Spread:
    """How far requests' levels lie apart: their variance in log odds, by the method of moments.

    A level at distance d from all requests' moves the hits of `n` tries at rate p by about
    d n p (1 - p); by chance alone, n p (1 - p) is their variance. So the variance of the levels is
    about sum(surplus^2 - chance) / sum(chance^2).
    """

    def __init__(self) -> None:
        # Sums over requests, to begin with of a guess: a variance of 2.
        self._excess, self._squares = 2.0, 1.0

    def observe(self, surplus: Floats, chance: Floats, steps: int) -> None:
        """Take in requests, `[R]` each: their hits beyond what is expected of all requests, and the
        variance of these hits by chance."""
        keep, share = REMEMBER**steps, (1 - REMEMBER**steps) / len(chance)
        self._excess = keep * self._excess + share * float(surplus @ surplus - chance.sum())
        self._squares = keep * self._squares + share * float(chance @ chance)

    def tries(self, chance: float) -> float:
        """Tries that all requests' level is worth against a request's own, if the hits of each try
        have that variance by chance."""
        least, most = SHRINK_REQUEST
        variance = self._excess / self._squares
        return min(max(1 / (variance * chance), least), most) if variance > 0 else most


class Survival:
    """Acceptance rates of each position, of each request.

    A request's estimate is its own rate, shrunk towards all requests' rate in two steps: the level
    of the request (one number, since easy text is easy at every position), then each position. The
    first step is the larger, the less requests have differed (empirical Bayes). Its counts are
    long, so that they are precise; they are dropped if its level lately does not fit them. All
    requests' rates, which a new request is expected to have, are those of a hundred steps, moved to
    the level of the last five: the next text may be of another kind, and steps that draft are few
    once drafting does not pay.
    """

    def __init__(self, drafts: int) -> None:
        """
        Args:
            drafts: drafts of a whole block, B - 1.
        """
        self.drafts = drafts
        self._rows: dict[Hashable, int] = {}
        # By request: hits at each position, tries at each, hits lately, tries lately.
        self._counts = np.zeros((16, 2 * drafts + 2))
        # Of all requests: hits at each position and tries at each, of long and lately.
        self._all = np.full(2 * drafts, GUESS_WEIGHT)
        self._all[:drafts] *= FIRST_GUESS
        self._all_lately = np.zeros(2 * drafts)
        self._spread, self._shrink_request = _Spread(), 4.0
        self._typical, self._typical_logit = self._all_rates()
        # Steps that were not taken in yet: their drafts and requests, and what each accepted.
        self._waiting_of: tuple[int, list[Hashable]] = (0, [])
        self._waiting: list[Sequence[int]] = []
        self._positions = np.arange(drafts)
        self._keep = np.full(2 * drafts + 2, REMEMBER)
        self._keep[-2:] = REMEMBER_LATELY

    def rows(self, requests: Sequence[Hashable]) -> Ints:
        """Int64 `[R]`: where each request's counts are; new requests begin without any."""
        self._take_in()
        return self._rows_of(requests)

    def _rows_of(self, requests: Sequence[Hashable]) -> Ints:
        known = self._rows
        found = [known.get(request, -1) for request in requests]
        if -1 in found:
            if len(known) >= MOST_REQUESTS:
                self._forget_all_but(requests)
            found = [self._row(request) for request in requests]
        return np.array(found, dtype=np.int64)

    def _row(self, request: Hashable) -> int:
        row = self._rows.setdefault(request, len(self._rows))
        if row >= len(self._counts):
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        return row

    def _forget_all_but(self, requests: Sequence[Hashable]) -> None:
        kept = [request for request in requests if request in self._rows]
        rows = [self._rows[request] for request in kept]
        counts = np.zeros_like(self._counts)
        counts[: len(rows)] = self._counts[rows]
        self._counts, self._rows = counts, {request: row for row, request in enumerate(kept)}

    def observe(
        self, requests: Sequence[Hashable], drafts: int, accepted: Sequence[int] = ()
    ) -> None:
        """A step verified `drafts` drafts of each request and accepted so many; 0 is a step in
        which nothing was drafted. Steps are taken in together, when an estimate is asked for."""
        if not requests:
            return
        if (drafts, requests) != self._waiting_of:
            self._take_in()
            self._waiting_of = drafts, list(requests)
        self._waiting.append(accepted)

    def _take_in(self) -> None:
        (drafts, requests), waiting = self._waiting_of, self._waiting
        if not waiting:
            return
        self._waiting_of, self._waiting = (0, []), []
        rows = self._rows_of(requests)
        if drafts == 0:
            self._counts[rows] *= REMEMBER_UNSEEN ** len(waiting)
            return
        # [K, R, 1], of K steps in their order.
        accepted = np.array(waiting, dtype=np.int64)[..., None]
        tried = np.minimum(accepted + 1, drafts)
        # [K, R, 2 B]: hits and tries at each position, and at any.
        is_hit, is_tried = self._positions < accepted, self._positions < tried
        steps = np.concatenate((is_hit, is_tried, accepted, tried), axis=2, dtype=np.float64)
        ages = np.arange(len(steps))[::-1, None]
        of_each = (self._keep**ages)[:, None] * steps
        self._counts[rows] = self._counts[rows] * self._keep ** len(steps) + of_each.sum(0)
        self._drop_outdated(rows)
        self._learn_spread(rows, len(steps))
        self._learn_all(rows, steps[:, :, : 2 * self.drafts], ages, drafts)

    def _learn_spread(self, rows: Ints, steps: int) -> None:
        n, counts, typical = self.drafts, self._counts[rows], self._typical
        tries = counts[:, n : 2 * n]
        chance = tries @ (typical * (1 - typical))
        self._spread.observe(counts[:, :n].sum(1) - tries @ typical, chance, steps)
        self._shrink_request = self._spread.tries(float(chance.sum() / tries.sum()))

    def _learn_all(self, rows: Ints, steps: Floats, ages: Ints, drafts: int) -> None:
        """Take hits and tries `[K, R, 2 (B - 1)]` of K steps into all requests' rates."""
        unreached = UNREACHED * (1 - steps[:, :, self.drafts :]) * (self._positions < drafts)
        expected = np.concatenate((unreached * self.acceptance(rows), unreached), axis=2)
        weight = min(1.0, MOST_AT_ONCE / len(rows))
        for counts, keep, of_each in (
            (self._all, REMEMBER, steps + expected),
            (self._all_lately, REMEMBER_ALL_LATELY, steps),
        ):
            counts *= keep ** len(steps)
            counts += weight * (keep**ages * of_each.sum(1)).sum(0)
        self._typical, self._typical_logit = self._all_rates()

    def _all_rates(self) -> tuple[Floats, Floats]:
        """All requests' acceptance rates `[B - 1]`, and their log odds."""
        # The first position is tried in every step, the last ones perhaps never.
        n = self.drafts
        hits, tries = self._all[:n], self._all[n:]
        rates = (hits + SHRINK_ALL * (hits.sum() / tries.sum())) / (tries + SHRINK_ALL)
        lately = self._all_lately
        least, most = SHRINK_LATELY
        shrink = min(max(self._shrink_request, least), most)
        shift = _shift(rates, lately[n:], lately[:n].sum(), shrink)
        odds = _logit(_between(rates)) + shift
        return 1 / (1 + np.exp(-odds)), odds

    def share_unknown(self, requests: Sequence[Hashable]) -> float:
        """Share of the requests of which no draft was tried."""
        unknown = np.count_nonzero(self._counts[self.rows(requests), -1] == 0)
        return unknown / max(1, len(requests))

    def _drop_outdated(self, rows: Ints) -> None:
        """Replace a request's counts by a few with the level of lately, if that does not fit."""
        counts, n = self._counts[rows], self.drafts
        hits, tries = counts[:, :n].sum(1), counts[:, n : 2 * n].sum(1)
        lately_hits, lately = counts[:, -2], counts[:, -1]
        rate = (hits + 0.5) / (tries + 1)
        surplus, variance = lately_hits - lately * rate, lately * rate * (1 - rate)
        changed = surplus * surplus > CHANGE**2 * variance
        for row in rows[changed]:
            all_hits, all_tries = self._counts[row, :n], self._counts[row, n : 2 * n]
            all_tries *= min(1.0, AFTER_CHANGE / all_tries.sum())
            np.multiply(all_tries, self._counts[row, -2] / self._counts[row, -1], out=all_hits)

    def acceptance(self, rows: Ints) -> Floats:
        """`[R, B - 1]`: the probability that a draft is accepted if those before it were."""
        n, counts = self.drafts, self._counts[rows]
        hits, tries = counts[:, :n], counts[:, n : 2 * n]
        shift = _shift(self._typical, tries, hits.sum(1), self._shrink_request)
        prior = 1 / (1 + np.exp(-(self._typical_logit + shift[:, None])))
        return (hits + SHRINK_POSITION * prior) / (tries + SHRINK_POSITION)

    def tokens(self, rows: Ints) -> Floats:
        """`[R, B]`: tokens that a request is expected to commit at width 1, 2, ... B."""
        expected = np.ones((len(rows), self.drafts + 1))
        expected[:, 1:] += self.acceptance(rows).cumprod(1).cumsum(1)
        return expected


def _shift(typical: Floats, tries: Floats, hits: Floats | float, shrink: float) -> Floats:
    """How far the level of some tries `[..., B - 1]` is from typical rates, in log odds `[...]`.

    It is shrunk towards them, by as much as `shrink` tries are worth.
    """
    total = tries.sum(-1)
    # The typical rate at the positions that were tried; at the first one if none was.
    expected = (tries @ typical + 1e-6 * typical[0]) / (total + 1e-6)
    level = (hits + shrink * expected) / (total + shrink)
    return _logit(_between(level)) - _logit(_between(expected))


def _between(p: Floats) -> Floats:
    return np.minimum(np.maximum(p, MARGIN), 1 - MARGIN)


def _logit(p: Floats) -> Floats:
    return np.log(p / (1 - p))
