"""The verify width that is chosen, against simulated texts and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from sglang_dflash.drafting.width import AdaptiveWidth, FixedWidth, WidthPolicy

WIDTHS = (1, 4, 8)
# Milliseconds of a step: plain decoding, and with a proposal. As measured on tiny models.
COST = {1: 8.0, 4: 15.6, 8: 19.2}
Text = Callable[[int, int], float]


def simulate(
    policy: WidthPolicy,
    text: Text,
    steps: int = 1000,
    requests: int = 1,
    cost: dict[int, float] | Callable[[int, int], float] = COST,
    noise: float = 0.05,
    lag: int = 1,
    seed: int = 0,
    most: int = 10**6,
    is_timed: Callable[[int], bool] = lambda _: True,
) -> tuple[float, list[int]]:
    """Tokens per millisecond and request, and the width of every step.

    Args:
        text: probability that a draft is accepted if those before it were, by step and request.
        cost: by width; or by step and width.
        noise: of costs, the standard deviation of their logarithm.
        lag: steps after which an outcome is known.
        most: tokens that a request can still take.
        is_timed: whether the duration of that step becomes known.
    """
    rng, names = np.random.default_rng(seed), [f"r{i}" for i in range(requests)]
    time = tokens = 0.0
    widths: list[int] = []
    outcomes: list[tuple[int, list[int]]] = []
    for step in range(steps):
        width = policy.choose(names, 500, most)
        rejected = rng.random((requests, width - 1)) >= np.array(
            [[text(step, i)] for i in range(requests)]
        )
        accepted = [int(row.argmax()) if row.any() else width - 1 for row in rejected]
        ms = (cost(step, width) if callable(cost) else cost[width]) * rng.lognormal(0, noise)
        time, tokens = time + ms, tokens + sum(accepted) + requests
        if is_timed(step):
            policy.took(ms / 1e3, requests, 500, width)
        outcomes.append((width, accepted))
        if len(outcomes) > lag:
            policy.observe(names, *outcomes.pop(0))
        widths.append(width)
    return tokens / time / requests, widths


def fixed(p: float, width: int) -> float:
    """Tokens per millisecond of a fixed width."""
    return sum(p**i for i in range(width)) / COST[width]


# -- throughput


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("p", [0.02, 0.2, 0.4, 0.5])
def test_useless_drafts_cost_three_percent(p: float, requests: int) -> None:
    rate, _ = simulate(AdaptiveWidth(WIDTHS), lambda *_: p, requests=requests)
    assert rate * COST[1] >= 0.97


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("p", [0.6, 0.7, 0.8, 0.95])
def test_good_drafts_get_the_best_width(p: float, requests: int) -> None:
    rate = np.mean(
        [
            simulate(AdaptiveWidth(WIDTHS), lambda *_: p, requests=requests, seed=seed)[0]
            for seed in range(8)
        ]
    )
    # One request's outcomes tell less: it takes longer to know.
    bound = 0.95 if requests == 1 else 0.975
    assert rate >= bound * max(fixed(p, width) for width in WIDTHS)


def test_changing_text_is_followed() -> None:
    period = 400

    def text(step: int, _request: int) -> float:
        return 0.92 if step // period % 2 == 0 else 0.1

    rate, widths = simulate(AdaptiveWidth(WIDTHS), text, steps=7 * period)
    for width in WIDTHS:
        assert rate > 1.1 * simulate(_Always(width), text, steps=7 * period)[0]
    for start in range(period, 6 * period, 2 * period):
        left = widths[start : start + 32]
        assert 1 in left and Counter(widths[start + 32 : start + period])[1] > 0.9 * (period - 32)
        resumed = widths[start + period : start + period + 128]
        assert Counter(resumed[-5:])[8] >= 4


class _Always(FixedWidth):
    """A fixed width below the block size."""


def test_mixed_batches_are_judged_as_a_whole() -> None:
    """Three hopeless requests beside one good one: drafting costs more than it brings."""
    rate, widths = simulate(AdaptiveWidth(WIDTHS), lambda _, i: 0.9 if i == 0 else 0.02, requests=4)
    assert rate * COST[1] >= 0.97 and Counter(widths)[1] > 900


def waves(policy: WidthPolicy, kind: str, p: float, count: int, requests: int = 16) -> float:
    """Tokens per millisecond and request of `count` batches of short answers, one after another,
    to requests that are new."""
    rng, time = np.random.default_rng(0), 0.0
    for wave in range(count):
        left = {f"{kind} {wave} {i}": 48 for i in range(requests)}
        late: tuple[int, list[str], list[int]] | None = None
        while left:
            names = list(left)
            width = policy.choose(names, 500, max(left.values()))
            rejected = rng.random((len(names), width - 1)) >= p
            accepted = [int(row.argmax()) if row.any() else width - 1 for row in rejected]
            policy.took(COST[width] / 1e3, requests, 500, width)
            time += COST[width]
            if late is not None:
                policy.observe(late[1], late[0], late[2])
            late = width, names, accepted
            left = {n: left[n] - a - 1 for n, a in zip(names, accepted, strict=True)}
            left = {name: tokens for name, tokens in left.items() if tokens > 0}
        assert late is not None
        policy.observe([], late[0], [])
    return count * 48 / time


def test_short_answers_to_another_kind_of_text_are_followed() -> None:
    """Of each request little is known; what others were like is soon out of date."""
    policy = AdaptiveWidth(WIDTHS)
    waves(policy, "a server's first steps", 0.98, 1)
    assert waves(policy, "easy", 0.98, 8) * COST[1] > 2.5
    assert waves(policy, "hard", 0.2, 6) * COST[1] > 0.93
    assert waves(policy, "easy again", 0.98, 8) * COST[1] > 2.5


def test_new_requests_are_tried_early_only_while_that_pays() -> None:
    """A probe costs more than a step, and a short answer has few of them."""
    policy = AdaptiveWidth(WIDTHS)
    waves(policy, "hard", 0.1, 12, requests=1)
    assert waves(policy, "as hard", 0.1, 40, requests=1) * COST[1] > 0.98
    # One in four is easy: after some of them, they are drafted from early on.
    rates = []
    for wave in range(24):
        waves(policy, f"hard {wave}", 0.1, 3, requests=1)
        rates.append(waves(policy, f"easy {wave}", 0.97, 1, requests=1))
    assert np.mean(rates[8:]) * COST[1] > 2.5


ADVERSARIAL: dict[str, tuple[Text, Callable[[int, int], float]]] = {
    "flips as soon as it is believed": (
        lambda s, _: 0.95 if s // 25 % 2 else 0.02,
        lambda _, w: COST[w],
    ),
    "100x outliers": (lambda *_: 0.1, lambda s, w: COST[w] * (100 if s % 97 == 0 else 1)),
    "outliers in drafting only": (
        lambda *_: 0.9,
        lambda s, w: COST[w] * (100 if w > 1 and s % 97 == 0 else 1),
    ),
    "the machine slows down": (lambda *_: 0.3, lambda s, w: COST[w] * (1 + s / 500)),
    "verification becomes dear": (
        lambda *_: 0.6,
        lambda s, w: COST[w] * (2 if w > 1 and s > 900 else 1),
    ),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_plain_decoding_is_never_lost_for_long(name: str) -> None:
    """No 200 steps below 0.95 of what plain decoding would have done in their time."""
    text, cost = ADVERSARIAL[name]
    rng, policy = np.random.default_rng(0), AdaptiveWidth(WIDTHS)
    plain, got = [], []
    for step in range(2000):
        width = policy.choose(["r"], 500, 10**6)
        rejected = rng.random(width - 1) >= text(step, 0)
        accepted = int(rejected.argmax()) if rejected.any() else width - 1
        ms = cost(step, width)
        policy.took(ms / 1e3, 1, 500, width)
        policy.observe(["r"], width, [accepted])
        outlier = ms / cost(1, width) > 50
        got.append(accepted + 1)
        plain.append(0.0 if outlier else ms / cost(step, 1))
    # The first steps measure.
    got, plain = got[64:], plain[64:]
    for start in range(0, len(got) - 200, 50):
        assert sum(got[start : start + 200]) >= 0.95 * sum(plain[start : start + 200]), start


# Of a batch so large that a step with drafts takes as long as four without.
COSTLY = {1: 18.0, 4: 62.0, 8: 79.0}


def test_probes_of_a_costly_batch_take_two_percent() -> None:
    """And tell of better drafts nonetheless."""
    policy = AdaptiveWidth(WIDTHS)
    _, widths = simulate(
        policy, lambda s, _: 0.35 if s < 3000 else 0.98, 3300, requests=32, cost=COSTLY
    )
    hopeless = widths[200:3000]
    lost = sum(COSTLY[width] - COSTLY[1] for width in hopeless)
    assert 0.01 < lost / sum(COSTLY[width] for width in hopeless) < 0.022
    assert Counter(widths[-60:])[8] > 55


def test_new_requests_of_a_costly_batch_are_tried_less_early() -> None:
    policy, widths = AdaptiveWidth(WIDTHS), []
    for step in range(400):
        names = [f"{i} since {step // 16}" for i in range(32)]
        width = policy.choose(names, 500, 100)
        policy.took(COSTLY[width] / 1e3, 32, 500, width)
        policy.observe(names, width, [0] * 32)
        widths.append(width)
    tried = [step for step, width in enumerate(widths) if width > 1]
    # Measured at the start, then at 5 % of the time at most.
    assert min(np.diff(tried)) == 1
    assert 50 < min(np.diff([step for step in tried if step > 60])) < 90


def test_drafts_that_were_too_dear_are_tried_again() -> None:
    """No probe pays while they are: it is not by acceptance that they are given up."""

    def cost(step: int, width: int) -> float:
        return COST[width] * (10 if width > 1 and 200 <= step < 600 else 1)

    _, widths = simulate(AdaptiveWidth(WIDTHS), lambda *_: 0.95, steps=5000, cost=cost)
    assert Counter(widths[300:600])[1] > 290 and Counter(widths[-500:])[8] > 480


@pytest.mark.parametrize("slow", [6, 40])
def test_first_steps_that_take_longer_are_soon_forgotten(slow: int) -> None:
    """Plain decoding was measured among them, and would be taken for as dear as drafts."""

    def cost(step: int, width: int) -> float:
        return COST[width] * (2.2 if step < slow and width == 1 else 1)

    policy = AdaptiveWidth(WIDTHS)
    _, widths = simulate(policy, lambda s, _: 0.95 if s < 150 else 0.35, steps=400, cost=cost)
    assert Counter(widths[60:150])[8] > 80
    assert Counter(widths[190:])[1] > 0.9 * (400 - 190)


def test_plain_decoding_is_measured_while_drafts_pay() -> None:
    """Each of its steps tells whether they still do."""
    _, widths = simulate(AdaptiveWidth(WIDTHS), lambda *_: 0.98, steps=2000)
    plain = Counter(widths[500:])[1]
    assert 10 <= plain <= 30


# -- limits


def test_a_width_never_exceeds_what_requests_can_take() -> None:
    policy = AdaptiveWidth(WIDTHS)
    simulate(policy, lambda *_: 0.95, steps=100)
    assert [policy.choose(["r0"], 500, most) for most in (100, 8, 7, 4, 3, 1, 0)] == [
        8, 8, 4, 4, 1, 1, 1,
    ]  # fmt: skip
    # It is a limit of those steps only.
    assert policy.choose(["r0"], 500, 100) == 8


def test_a_limit_above_the_chosen_width_needs_no_new_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, decided = AdaptiveWidth(WIDTHS), []
    simulate(policy, lambda *_: 0.02, steps=300)
    decide = policy._decide
    monkeypatch.setattr(policy, "_decide", lambda *of: decided.append(of) or decide(*of))
    policy.choose(["of another batch"], 500, 100)
    assert [policy.choose(["of another batch"], 500, most) for most in (100, 7, 3)] == [1, 1, 1]
    assert len(decided) == 1


def test_requests_without_drafts_weigh_against_drafting() -> None:
    """Each takes one token at any width, and its step becomes as long as the others'."""
    policy = AdaptiveWidth(WIDTHS)
    for _ in range(30):
        for width in WIDTHS:
            policy.took(COST[width] / 1e3, 9, 500, width)
        policy.choose(["r"], 500, 100, undrafted=8)
        policy.observe(["r"], 8, [7])
    assert policy.choose(["r"], 500, 100, undrafted=8) == 1
    simulate(policy, lambda *_: 0.95, steps=50)
    assert policy.choose(["r0"], 500, 100) == 8


def test_a_batch_without_drafts_is_decoded_plainly() -> None:
    assert AdaptiveWidth(WIDTHS).choose([], 500, 100) == 1


def test_a_fixed_width_stays() -> None:
    policy = FixedWidth(8)
    assert {policy.choose([], 0, 0), policy.choose(["a"], 10**5, 1)} == {8}


@pytest.mark.parametrize("widths", [(4, 8), (1,), (1, 8, 4), (1, 4, 4, 8), ()])
def test_widths_begin_at_one_and_ascend(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending numbers from 1"):
        AdaptiveWidth(widths)
