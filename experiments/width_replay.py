"""Replays recorded steps: how well acceptance is predicted, and what widths chosen by it are worth.

The width is chosen after the block was drafted, from what is known then. All requests of a step get
the same width ("uniform"), or each its own ("ragged"); a ragged step costs what a uniform one with
as many tokens costs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from sglang_dflash.drafting.width.survival import Survival

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

OUTCOMES, NOW, BEFORE = "outcomes", "confidence", "confidence before"
# Steps of requests between two fits, the batches' steps that a fit looks back on, and how firmly it
# stays at its prior.
REFIT, LOOK_BACK, RIDGE = 100, 2000, 0.01
# Steps that weigh as much as the first guess of an arm's speed.
GUESS_STEPS = 20
MARGIN = 0.001
# Share of the requests from which a batch counts as full.
MOST = 0.75


class Recorded(NamedTuple):
    """One step that verified whole blocks.

    Attributes:
        requests: ids `[R]`.
        accepted: accepted drafts `[R]`.
        confidence: the drafter's probability of each draft `[R, B - 1]`.
    """

    requests: list[str]
    accepted: list[int]
    confidence: list[list[float]]


class CalibratedMap:
    """Acceptance at each position from features, by logistic regression on the outcomes of the last
    steps. Drafts after a rejected one have no outcome and are left out.

    It begins as the first feature itself, which is a log odds of acceptance.
    """

    def __init__(self, drafts: int, features: int) -> None:
        """
        Args:
            drafts: B - 1.
            features: numbers per draft.
        """
        self._positions = np.arange(drafts)
        self._prior = np.zeros(drafts + features)
        self._prior[drafts] = 1.0
        self._weights, self._since = self._prior, 0
        self._examples: deque[tuple[Floats, Floats]] = deque(maxlen=LOOK_BACK)

    def acceptance(self, features: Floats) -> Floats:
        """`[R, B - 1]` from `[R, B - 1, features]`: the probability that a draft is accepted if
        those before it were."""
        accepted: Floats = expit(self._inputs(features) @ self._weights)
        return accepted

    def learn(self, features: Floats, accepted: Ints) -> None:
        """Take in a step's outcomes `[R]`."""
        is_tried = self._positions <= accepted[:, None]
        is_hit = self._positions < accepted[:, None]
        self._examples.append((self._inputs(features)[is_tried], is_hit[is_tried].astype(float)))
        self._since += len(accepted)
        if self._since >= REFIT:
            self._fit()
            self._since = 0

    def _inputs(self, features: Floats) -> Floats:
        drafts = len(self._positions)
        own = np.broadcast_to(np.eye(drafts), (len(features), drafts, drafts))
        return np.concatenate((own, features), axis=2)

    def _fit(self) -> None:
        inputs, hits = (np.concatenate(parts) for parts in zip(*self._examples, strict=True))

        def loss(weights: Floats) -> tuple[float, Floats]:
            odds, off = inputs @ weights, weights - self._prior
            value = np.logaddexp(0, odds).sum() - hits @ odds + RIDGE / 2 * off @ off
            return float(value), inputs.T @ (expit(odds) - hits) + RIDGE * off

        self._weights = minimize(loss, self._weights, jac=True, method="L-BFGS-B").x


def is_full(running: int, requests: int) -> bool:
    """Whether that many running requests are most of `requests`."""
    return running >= MOST * requests


def uniform(survival: Floats, costs: Floats, rate: float) -> Ints:
    """The same width for all requests, int64 `[R]`: the one with the most tokens beyond what its
    time is worth.

    Args:
        survival: `[R, B - 1]`, the probability that a draft and all before it are accepted.
        costs: `[B]`, seconds of a step by width, from 1.
        rate: tokens per second that a second is worth.
    """
    gain = survival.sum(0).cumsum() - rate * costs[1:]
    return np.full(len(survival), int(gain.argmax()) + 2, dtype=np.int64)


def ragged(survival: Floats, costs: Floats, rate: float) -> Ints:
    """Each request's own width, int64 `[R]`: the drafts that most likely survive are verified, as
    many as pay. Arguments as of `uniform`."""
    requests, drafts = survival.shape
    # Survival falls along a block: the best drafts of all are the first ones of each.
    order = np.argsort(-survival, axis=None, kind="stable")
    tokens = requests + np.arange(1, order.size + 1)
    gain = survival.ravel()[order].cumsum() - rate * seconds_of(tokens / requests, costs)
    chosen = order[: int(gain.argmax()) + 1]
    return 1 + np.bincount(chosen // drafts, minlength=requests)


def seconds_of(width: Floats | float, costs: Floats) -> Floats:
    """Seconds of a step that drafts, with so many tokens per request on average. Below two they
    count as two: what width 1 costs is without a draft."""
    found: Floats = np.interp(width, np.arange(2, len(costs) + 1), costs[1:])
    return found


@dataclass
class _Arm:
    """Tokens and seconds of one way to choose widths; to begin with, those of a guess."""

    guess: tuple[float, float]
    tokens: float = 0.0
    seconds: float = 0.0

    def rate(self) -> float:
        return (self.tokens + self.guess[0]) / (self.seconds + self.guess[1])

    def step(self, widths: Ints, accepted: Ints, costs: Floats) -> None:
        self.tokens += float((1 + np.minimum(accepted, widths - 1)).sum())
        self.seconds += float(seconds_of(widths.mean(), costs))


@dataclass
class _Prediction:
    """What one predictor said of tried drafts and of whole steps, and what happened."""

    losses: list[Floats] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)

    def add(self, acceptance: Floats, is_tried: Bools, is_hit: Bools) -> None:
        sure = np.clip(np.where(is_hit, acceptance, 1 - acceptance), MARGIN, 1)
        self.losses.append(-np.log(sure)[is_tried])
        self.expected += acceptance.cumprod(1).sum(1).tolist()


class Replay:
    """One recorded run. Widths are chosen in steps with most of `requests` requests; others are
    learned from."""

    def __init__(self, costs: Sequence[float], requests: int) -> None:
        """
        Args:
            costs: seconds of a step of `requests` requests by width, from 1 to B.
        """
        self._costs, self._requests = np.array(costs), requests
        drafts = len(costs) - 1
        self._positions = np.arange(drafts)
        self._survival = Survival(drafts)
        self._maps = {NOW: CalibratedMap(drafts, 2), BEFORE: CalibratedMap(drafts, 3)}
        self._last: dict[str, Floats] = {}
        self._predictions = {name: _Prediction() for name in (OUTCOMES, NOW, BEFORE)}
        self._accepted: list[int] = []

    def run(self, steps: Sequence[Recorded]) -> dict[str, Any]:
        """Log loss per draft and correlation of expected and accepted drafts by predictor; by way
        to choose widths, its speed over `outcomes`."""
        guess = self._best_fixed(steps)
        arms: dict[str, _Arm] = defaultdict(lambda: _Arm(guess))
        seen = 0
        for step in steps:
            accepted = np.array(step.accepted, dtype=np.int64)
            rates = self._survival.acceptance(self._survival.rows(step.requests))
            features = self._features(step, rates)
            found = {name: of.acceptance(features[name]) for name, of in self._maps.items()}
            found[OUTCOMES] = rates
            # The first fit is rough.
            seen += len(accepted)
            if seen > 2 * REFIT and is_full(len(accepted), self._requests):
                self._compare(found, accepted)
                self._choose(found, accepted, arms)
            for name, of in self._maps.items():
                of.learn(features[name], accepted)
            self._survival.observe(step.requests, len(self._positions), step.accepted)
        return self._summary(arms)

    def _best_fixed(self, steps: Sequence[Recorded]) -> tuple[float, float]:
        """Tokens and seconds of a few steps at the fixed width that was best."""
        accepted = np.array(
            [
                n
                for step in steps
                if is_full(len(step.accepted), self._requests)
                for n in step.accepted
            ]
        )
        widths = np.arange(2, len(self._costs) + 1)
        tokens = self._requests * (1 + np.minimum(accepted, widths[:, None] - 1).mean(1))
        best = int((tokens / self._costs[1:]).argmax())
        return GUESS_STEPS * float(tokens[best]), GUESS_STEPS * float(self._costs[best + 1])

    def _features(self, step: Recorded, rates: Floats) -> dict[str, Floats]:
        """By predictor `[R, B - 1, features]`, log odds of the rates first."""
        now = _logit(np.array(step.confidence))
        nothing = np.zeros(len(self._positions))
        before = np.array([self._last.get(request, nothing) for request in step.requests])
        level = np.broadcast_to(before.mean(1, keepdims=True), before.shape)
        self._last.update(zip(step.requests, now, strict=True))
        own = _logit(rates)
        return {NOW: np.stack((own, now), 2), BEFORE: np.stack((own, before, level), 2)}

    def _compare(self, found: Mapping[str, Floats], accepted: Ints) -> None:
        is_tried = self._positions <= accepted[:, None]
        is_hit = self._positions < accepted[:, None]
        self._accepted += accepted.tolist()
        for name, acceptance in found.items():
            self._predictions[name].add(acceptance, is_tried, is_hit)

    def _choose(
        self, found: Mapping[str, Floats], accepted: Ints, arms: Mapping[str, _Arm]
    ) -> None:
        survival = {name: acceptance.cumprod(1) for name, acceptance in found.items()}
        survival["foresight"] = (self._positions < accepted[:, None]).astype(float)
        for name in (OUTCOMES, NOW, "foresight"):
            for way in (uniform, ragged):
                arm = arms[name if way is uniform else f"{name}, ragged"]
                arm.step(way(survival[name], self._costs, arm.rate()), accepted, self._costs)
        for width in range(2, len(self._costs) + 1):
            arms[f"fixed {width}"].step(np.full_like(accepted, width), accepted, self._costs)

    def _summary(self, arms: Mapping[str, _Arm]) -> dict[str, Any]:
        speeds = {name: arm.tokens / arm.seconds for name, arm in arms.items()}
        accepted = np.array(self._accepted)
        predictions = {
            name: {
                "log_loss": round(float(np.concatenate(of.losses).mean()), 3),
                "correlation": round(float(np.corrcoef(of.expected, accepted)[0, 1]), 3),
            }
            for name, of in self._predictions.items()
        }
        over = {name: round(speed / speeds[OUTCOMES], 3) for name, speed in speeds.items()}
        return {"predictions": predictions, "speed_over_outcomes": over}


def _logit(p: Floats) -> Floats:
    between = np.clip(p, MARGIN, 1 - MARGIN)
    odds: Floats = np.log(between / (1 - between))
    return odds
