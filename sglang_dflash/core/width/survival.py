"""How likely a draft survives verification, by request and by its position in the block.

Learned from outcomes only. A step of width w that accepts a < w - 1 drafts shows a drafts that were
accepted and one that was not; what came after that one is unknown (censored), and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Weight of earlier steps at each new one: of a request's rates (a hundred steps count), of its
# level lately (six), and of all requests' rates, per batch step.
REMEMBER, REMEMBER_LATELY, REMEMBER_ALL = 0.99, 0.85, 0.99
# The same for a step in which nothing was drafted: what was known grows old.
REMEMBER_UNSEEN = 0.98
# Standard deviations between a request's level lately and before at which its text has changed.
CHANGE = 2.5
# Tries that are left of a request's counts then: the next steps decide.
AFTER_CHANGE = 4.0
# A draft that was never tried counts as accepted this often, with the weight of so many tries. So
# a server begins by drafting, and a few batches decide whether it goes on.
FIRST_GUESS, GUESS_WEIGHT = 0.8, 4.0
# Tries that all requests' rate is worth against a request's own, over all positions and at one.
SHRINK_REQUEST, SHRINK_POSITION = 1.5, 3.0
# Estimates stay away from 0 and 1 by this much.
MARGIN = 0.01
# Requests that are remembered. Beyond it, those outside the running batch are forgotten.
MOST_REQUESTS = 4096


class Survival:
    """Acceptance rates of each position, of each request.

    A request's estimate is its own rate, shrunk towards all requests' rate in two steps: the level
    of the request (one number, since easy text is easy at every position), then each position. Its
    counts are long, so that they are precise; they are dropped if its level lately does not fit
    them.
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
        self._all_hits = np.full(drafts, FIRST_GUESS * GUESS_WEIGHT)
        self._all_tries = np.full(drafts, GUESS_WEIGHT)
        self._typical, self._typical_logit = self._all_rates()
        self._positions = np.arange(drafts)
        self._keep = np.full(2 * drafts + 2, REMEMBER)
        self._keep[-2:] = REMEMBER_LATELY

    def rows(self, requests: Sequence[Hashable]) -> Ints:
        """Int64 `[R]`: where each request's counts are; new requests begin without any."""
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

    def observe(self, rows: Ints, drafts: int, accepted: Ints) -> None:
        """Take in a step that verified `drafts` drafts of each request and accepted int64 `[R]`."""
        if drafts == 0:
            self._counts[rows] *= REMEMBER_UNSEEN
            return
        tried = np.minimum(accepted + 1, drafts)
        is_hit = self._positions < accepted[:, None]
        is_tried = self._positions < tried[:, None]
        step = np.concatenate((is_hit, is_tried, accepted[:, None], tried[:, None]), axis=1)
        self._counts[rows] = self._counts[rows] * self._keep + step
        self._drop_outdated(rows)
        self._all_hits = self._all_hits * REMEMBER_ALL + is_hit.sum(0)
        self._all_tries = self._all_tries * REMEMBER_ALL + is_tried.sum(0)
        self._typical, self._typical_logit = self._all_rates()

    def _all_rates(self) -> tuple[Floats, Floats]:
        """All requests' acceptance rates `[B - 1]`, and their log odds."""
        rates = _between(self._all_hits / self._all_tries)
        return rates, _logit(rates)

    def _drop_outdated(self, rows: Ints) -> None:
        """Replace a request's counts by a few with the level of lately, if that does not fit."""
        counts, n = self._counts[rows], self.drafts
        hits, tries = counts[:, :n].sum(1), counts[:, n : 2 * n].sum(1)
        lately_hits, lately = counts[:, -2], counts[:, -1]
        rate = (hits + 0.5) / (tries + 1)
        spread = np.sqrt(lately * rate * (1 - rate))
        changed = np.abs(lately_hits - lately * rate) > CHANGE * spread
        for row in rows[changed]:
            all_hits, all_tries = self._counts[row, :n], self._counts[row, n : 2 * n]
            all_tries *= min(1.0, AFTER_CHANGE / all_tries.sum())
            np.multiply(all_tries, self._counts[row, -2] / self._counts[row, -1], out=all_hits)

    def acceptance(self, rows: Ints) -> Floats:
        """`[R, B - 1]`: the probability that a draft is accepted if those before it were."""
        n, counts = self.drafts, self._counts[rows]
        hits, tries = counts[:, :n], counts[:, n : 2 * n]
        total = tries.sum(1)
        # All requests' rate at the positions that this request has tried.
        typical = (tries @ self._typical + 1e-6 * self._typical[0]) / (total + 1e-6)
        level = (hits.sum(1) + SHRINK_REQUEST * typical) / (total + SHRINK_REQUEST)
        shift = _logit(_between(level)) - _logit(typical)
        prior = 1 / (1 + np.exp(-(self._typical_logit + shift[:, None])))
        return (hits + SHRINK_POSITION * prior) / (tries + SHRINK_POSITION)

    def tokens(self, rows: Ints) -> Floats:
        """`[R, B]`: tokens that a request is expected to commit at width 1, 2, ... B."""
        expected = np.ones((len(rows), self.drafts + 1))
        expected[:, 1:] += self.acceptance(rows).cumprod(1).cumsum(1)
        return expected


def _between(p: Floats) -> Floats:
    return np.minimum(np.maximum(p, MARGIN), 1 - MARGIN)


def _logit(p: Floats) -> Floats:
    return np.log(p / (1 - p))
