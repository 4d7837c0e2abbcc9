"""The verify width that is chosen, against simulated texts and costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from sglang_dflash.drafting.width import (
    COLD_STEPS,
    AdaptiveWidth,
    CostBucket,
    StepSeconds,
    Survival,
    TimedStep,
    WidthPolicy,
    _Chosen,
)

WIDTHS = (1, 4, 8)


def on_a_cpu(_step: int, width: int, running: int) -> float:
    """Milliseconds, as measured on tiny models."""
    times = {1: 1.0, 4: 1.6 + 0.02 * running, 8: 1.95 + 0.03 * running}[width]
    return (4.5 + 0.55 * running) * times


@dataclass(frozen=True)
class Trace:
    """The traffic and the step times that a server meets.

    Attributes:
        text: probability that a draft is accepted if those before it were, by step, number of the
            request and position in its answer.
        cost: milliseconds by step, width and running requests.
        running: requests at a time.
        length: tokens of each answer; the next request follows.
        noise: of costs, the standard deviation of their logarithm.
    """

    text: Callable[[int, int, int], float]
    cost: Callable[[int, int, int], float] = on_a_cpu
    running: int | Callable[[int], int] = 1
    length: int = 10**6
    noise: float = 0.05


def simulate(
    policy: WidthPolicy,
    trace: Trace,
    steps: int = 1500,
    seed: int = 0,
    is_timed: Callable[[int], bool] = lambda _: True,
) -> tuple[float, list[int]]:
    """Tokens per millisecond, and the width of every step. An outcome is known one step later."""
    rng = np.random.default_rng(seed)
    time, tokens, made = 0.0, 0, 0
    slots: list[list[int]] = []
    widths: list[int] = []
    late: tuple[int, dict[int, int]] | None = None
    for step in range(steps):
        running = trace.running(step) if callable(trace.running) else trace.running
        while len(slots) < running:
            slots.append([made, 0])
            made += 1
        batch = slots[:running]
        names = [request for request, _ in batch]
        most = max(trace.length - at for _, at in batch)
        width = policy.choose(names, 500, most)
        chances = [[trace.text(step, request, at)] for request, at in batch]
        rejected = rng.random((running, width - 1)) >= np.array(chances)
        accepted = [int(row.argmax()) if row.any() else width - 1 for row in rejected]
        ms = trace.cost(step, width, running) * rng.lognormal(0, trace.noise)
        if is_timed(step):
            policy.record(TimedStep(ms / 1e3, running, 500, width))
        if late is not None:
            live = [name for name in late[1] if name in names]
            policy.observe(live, late[0], [late[1][name] for name in live])
        late = width, dict(zip(names, accepted, strict=True))
        time, tokens = time + ms, tokens + sum(accepted) + running
        widths.append(width)
        for slot, drafts in zip(batch, accepted, strict=True):
            slot[1] += drafts + 1
            if slot[1] >= trace.length:
                slot[:] = made, 0
                made += 1
    return tokens / time, widths


def over_best_fixed(trace: Trace, seeds: int = 1, steps: int = 1500) -> float:
    """Speed over that of the best fixed width: the geometric mean over seeds."""
    logs = []
    for seed in range(seeds):
        best = max(simulate(WidthPolicy(width), trace, steps, seed)[0] for width in WIDTHS)
        logs.append(math.log(simulate(AdaptiveWidth(WIDTHS), trace, steps, seed)[0] / best))
    return math.exp(sum(logs) / seeds)


def always(chance: float) -> Callable[[int, int, int], float]:
    return lambda _step, _request, _at: chance


def alternating(good: float, bad: float, period: int) -> Callable[[int, int, int], float]:
    """Text that changes after so many steps."""
    return lambda step, _request, _at: bad if step // period % 2 else good


def by_request(good: float, bad: float, count: int) -> Callable[[int, int, int], float]:
    """So many requests of one kind, then as many of the other."""
    return lambda _step, request, _at: bad if request // count % 2 else good


def changing_cost(factor: Callable[[int, int], float]) -> Callable[[int, int, int], float]:
    return lambda step, width, running: on_a_cpu(step, width, running) * factor(step, width)


# -- throughput


@pytest.mark.parametrize("running", [1, 8])
@pytest.mark.parametrize("p", [0.02, 0.2, 0.4, 0.5])
def test_useless_drafts_cost_three_percent(p: float, running: int) -> None:
    rate, _ = simulate(AdaptiveWidth(WIDTHS), Trace(always(p), running=running))
    assert rate * on_a_cpu(0, 1, running) >= 0.97 * running


@pytest.mark.parametrize("running", [1, 8])
@pytest.mark.parametrize("p", [0.6, 0.95])
def test_good_drafts_get_the_best_width(p: float, running: int) -> None:
    # One request's outcomes tell less: it takes longer to know.
    least = 0.95 if running == 1 else 0.97
    assert (
        over_best_fixed(Trace(always(p), running=running), seeds=6 if running == 1 else 2) >= least
    )


REALISTIC = {
    "text changes": Trace(alternating(0.92, 0.1, 400)),
    "text changes, 8 requests": Trace(alternating(0.92, 0.1, 400), running=8),
    "phases of 50 steps": Trace(alternating(0.95, 0.2, 50)),
    "short answers": Trace(always(0.7), length=48),
    "short useless answers": Trace(always(0.1), length=48, running=4),
    "easy, then hard answers": Trace(by_request(0.98, 0.2, 64), length=48, running=16),
    "every fourth is easy": Trace(lambda _s, r, _a: 0.1 if r % 4 else 0.97, length=48),
    "mixed requests": Trace(lambda _s, r, _a: 0.9 if r % 2 else 0.3, length=300, running=8),
    "one good request of four": Trace(lambda _s, r, _a: 0.02 if r % 4 else 0.9, running=4),
    "waves of load": Trace(always(0.7), running=lambda s: 16 if s // 200 % 2 else 1, length=400),
    "context grows, drafts become cheaper": Trace(
        always(0.5), changing_cost(lambda s, w: 1 if w > 1 else 1 + s / 750)
    ),
    "context grows, drafts become dearer": Trace(
        always(0.65), changing_cost(lambda s, w: 1 + (w - 1) * s / 6000)
    ),
    "slow first steps": Trace(always(0.3), changing_cost(lambda s, _: 3 if s < 20 else 1)),
    "slow first plain steps": Trace(
        lambda s, _r, _a: 0.95 if s < 150 else 0.35,
        changing_cost(lambda s, w: 2.2 if s < 40 and w == 1 else 1),
    ),
    "the machine drifts": Trace(
        always(0.6), changing_cost(lambda s, _: 1.5 + 0.5 * math.sin(s / 200))
    ),
    "the machine slows down": Trace(always(0.3), changing_cost(lambda s, _: 1 + s / 500)),
    "a costly batch": Trace(
        always(0.3), lambda _s, w, _n: {1: 18, 4: 62, 8: 79}[w], running=32, length=300
    ),
}

ADVERSARIAL = {
    "flips as soon as it is believed": Trace(alternating(0.02, 0.95, 25)),
    "bad bursts in good text": Trace(lambda s, _r, _a: 0.02 if s % 60 >= 50 else 0.95),
    "good bursts in bad text": Trace(lambda s, _r, _a: 0.98 if s % 60 >= 50 else 0.05),
    "every answer is another kind": Trace(by_request(0.98, 0.05, 1), length=48),
    "drafting is 10 times dearer for 400 steps": Trace(
        always(0.95), changing_cost(lambda s, w: 10 if w > 1 and 200 <= s < 600 else 1)
    ),
    "100x outliers": Trace(always(0.1), changing_cost(lambda s, _: 1 if s % 97 else 100)),
    "100x outliers of drafting": Trace(
        always(0.9), changing_cost(lambda s, w: 100 if w > 1 and s % 97 == 0 else 1)
    ),
    "drafting becomes dear": Trace(
        always(0.6), changing_cost(lambda s, w: 2 if w > 1 and s > 900 else 1)
    ),
    "drafting becomes cheap": Trace(
        always(0.5), changing_cost(lambda s, w: 0.5 if w > 1 and s > 600 else 1)
    ),
    "all becomes dear for a while": Trace(
        always(0.6), changing_cost(lambda s, _: 3 if 300 < s < 600 else 1)
    ),
    "noise of 35 %": Trace(always(0.55), noise=0.35),
}


@pytest.mark.parametrize("name", [*REALISTIC, *ADVERSARIAL])
def test_no_fixed_width_is_much_better(name: str) -> None:
    assert over_best_fixed((REALISTIC | ADVERSARIAL)[name]) >= 0.93


def test_changing_text_is_followed() -> None:
    period = 400
    trace = Trace(alternating(0.92, 0.1, period))
    _, widths = simulate(AdaptiveWidth(WIDTHS), trace, steps=7 * period)
    for start in range(period, 6 * period, 2 * period):
        left = widths[start : start + 32]
        assert 1 in left and Counter(widths[start + 32 : start + period])[1] > 0.9 * (period - 32)
        resumed = widths[start + period : start + period + 128]
        assert Counter(resumed[-5:])[8] >= 4


def test_drafts_that_were_too_dear_are_tried_again() -> None:
    """No try pays while they are: it is not by acceptance that they are given up."""
    trace = ADVERSARIAL["drafting is 10 times dearer for 400 steps"]
    _, widths = simulate(AdaptiveWidth(WIDTHS), trace, steps=5000)
    assert Counter(widths[300:600])[1] > 290 and Counter(widths[-500:])[8] > 470


def test_tries_of_a_costly_batch_take_three_percent() -> None:
    """They tell of better drafts nonetheless."""
    cost = {1: 18.0, 4: 62.0, 8: 79.0}
    trace = Trace(
        lambda s, _r, _a: 0.35 if s < 3000 else 0.98, lambda _s, w, _n: cost[w], running=32
    )
    _, widths = simulate(AdaptiveWidth(WIDTHS), trace, steps=3400)
    hopeless = widths[200:3000]
    lost = sum(cost[width] - cost[1] for width in hopeless)
    assert 0.003 < lost / sum(cost[width] for width in hopeless) < 0.03
    assert Counter(widths[-60:])[8] > 55


def test_plain_decoding_is_measured_while_drafts_pay() -> None:
    """Each of its steps tells whether they still do."""
    _, widths = simulate(AdaptiveWidth(WIDTHS), Trace(always(0.98)), steps=2000)
    assert 4 <= Counter(widths[500:])[1] <= 15


def test_what_pays_for_one_request_is_measured_anew_for_eight() -> None:
    """Milliseconds of SmolLM2 in float32: four tokens of one request take as long as one, those of
    eight twice as long. In proportion to one request's, plain decoding never seemed to pay."""
    cost = {(1, 1): 73, (1, 4): 73, (1, 8): 85, (8, 1): 76, (8, 4): 146, (8, 8): 284}
    trace = Trace(
        lambda _s, _r, at: 0.5 if at % 2 else 0.2,
        lambda _s, width, running: cost[running, width],
        running=lambda step: 1 if step < 200 else 8,
        length=32,
    )
    _, widths = simulate(AdaptiveWidth(WIDTHS), trace, steps=320)
    assert Counter(widths[60:200])[4] > 100
    assert Counter(widths[220:])[1] > 85


# -- what cannot be measured, and limits


@pytest.mark.parametrize("known", [0, COLD_STEPS + 3, 30])
def test_steps_that_cannot_be_timed_are_as_with_a_fixed_width(known: int) -> None:
    """With short answers a prefill follows every step, which then has no duration."""
    _, widths = simulate(
        AdaptiveWidth(WIDTHS), Trace(always(0.9)), 600, is_timed=lambda step: step < known
    )
    assert Counter(widths[100:])[8] > 450


def test_what_could_not_be_timed_is_measured_later() -> None:
    _, widths = simulate(
        AdaptiveWidth(WIDTHS), Trace(always(0.1)), 1500, is_timed=lambda step: step >= 500
    )
    assert set(widths[100:500]) == {8} and Counter(widths[600:])[1] > 850


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_that_are_all_shorter_than_a_block(drafts: bool) -> None:
    policy = AdaptiveWidth(WIDTHS)
    _, widths = simulate(policy, Trace(always(0.95 if drafts else 0.05), length=6), 600)
    assert Counter(widths[60:])[1] < 60 if drafts else Counter(widths[60:])[1] > 500


def test_tokens_after_the_end_of_an_answer_are_no_gain() -> None:
    policy = AdaptiveWidth(WIDTHS)
    simulate(policy, Trace(always(0.95)), steps=100)
    assert [policy.choose([0], 500, most) for most in (100, 8, 7, 4, 3, 1, 0)] == [
        8, 8, 8, 4, 4, 1, 1,
    ]  # fmt: skip
    # It is a limit of those steps only.
    assert policy.choose([0], 500, 100) == 8


def test_requests_without_drafts_weigh_against_drafting() -> None:
    """Each takes one token at any width, and its step becomes as long as the others'."""

    def last(undrafted: int) -> int:
        policy = AdaptiveWidth(WIDTHS)
        for _ in range(60):
            width = policy.choose(["r"], 500, 100, undrafted=undrafted)
            seconds = on_a_cpu(0, width, 9) / 1e3
            policy.record(TimedStep(seconds, 1 + undrafted, 500, width))
            policy.observe(["r"], width, [width - 1])
        return Counter([policy.choose(["r"], 500, 100, undrafted=undrafted) for _ in range(5)])[8]

    assert last(undrafted=0) == 5 and last(undrafted=8) == 0


def test_a_batch_without_drafts_is_decoded_plainly() -> None:
    assert AdaptiveWidth(WIDTHS).choose([], 500, 100) == 1


@pytest.mark.parametrize("widths", [(4, 8), (1,), (1, 8, 4), (1, 4, 4, 8), ()])
def test_widths_begin_at_one_and_ascend(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending numbers from 1"):
        AdaptiveWidth(widths)


def test_the_end_of_an_answer_does_not_change_the_best_width() -> None:
    """It did, so that `width_now` and doctor named the width of an answer's last tokens."""
    policy = AdaptiveWidth(WIDTHS)
    simulate(policy, Trace(always(0.98)), steps=500)
    best = policy.report()["width_now"]
    assert best == WIDTHS[-1]
    assert policy.choose(["r"], 500, 2) < best == policy.report()["width_now"]


def test_what_is_reported() -> None:
    policy = AdaptiveWidth(WIDTHS)
    simulate(policy, Trace(always(0.1), running=3), steps=500)
    report = policy.report()
    assert report["width"] == "adaptive" and report["width_now"] == 1
    assert 0 < report["width_probes"] < 60 and 0.005 < report["width_probe_share"] < 0.06
    (place,) = report["width_costs"]
    assert (place["requests"], place["context"]) == (4, 2048)
    for width in WIDTHS:
        measured = place["milliseconds"][str(width)]
        assert measured == pytest.approx(on_a_cpu(0, width, 3), rel=0.15)


# -- its parts


def test_drafts_that_were_not_verified_change_as_the_last_one_that_was() -> None:
    survival = Survival(7)
    for _ in range(300):
        survival.observe(3, [0])
    assert survival.probabilities == pytest.approx([1e-4] * 7, abs=2e-4)
    for _ in range(300):
        survival.observe(3, [3])
    third, *rest = survival.probabilities[2:]
    assert third > 0.95 and rest == pytest.approx([third] * 4)


def test_an_outlier_is_no_cost_and_a_change_is_one() -> None:
    seconds, bucket, other = StepSeconds((1, 8)), CostBucket.of(1, 500), CostBucket.of(16, 500)
    for width, each in ((1, 0.01), (8, 0.02)):
        seconds.record(bucket, width, each)
        seconds.record(other, width, 2 * each)
        for _ in range(10):
            assert not seconds.record(bucket, width, each)
            assert not seconds.record(other, width, 2 * each)
    assert seconds.record(bucket, 8, 5.0)
    assert seconds.at(bucket) == {1: 0.01, 8: 0.02}
    assert seconds.record(bucket, 8, 0.04)
    assert seconds.record(bucket, 8, 0.042)
    # In every bucket, in proportion.
    assert seconds.at(bucket) == {1: 0.01, 8: 0.042}
    assert seconds.at(other)[8] == pytest.approx(0.084)


def test_unknown_costs_are_in_proportion_to_the_nearest_bucket() -> None:
    seconds = StepSeconds(WIDTHS)
    assert not seconds.at(CostBucket.of(1, 1))
    for requests, scale in ((1, 1.0), (32, 9.0)):
        for width in WIDTHS:
            seconds.record(CostBucket.of(requests, 500), width, scale * width)
    seconds.record(CostBucket.of(16, 500), 1, 5.0)
    assert seconds.at(CostBucket.of(16, 500)) == {1: 5.0, 4: 20.0, 8: 40.0}
    assert seconds.at(CostBucket.of(2, 500)) == {1: 1.0, 4: 4.0, 8: 8.0}


def test_a_step_without_an_outcome_is_not_taken_for_a_later_one() -> None:
    """A step that failed is chosen and never observed; the probe after it paid."""
    policy = AdaptiveWidth(WIDTHS)
    policy._undecided.extend(
        (_Chosen(WIDTHS[0]), _Chosen(WIDTHS[-1], break_even=1.0, is_probe=True))
    )
    policy.observe(["r"], WIDTHS[-1], [WIDTHS[-1] - 1])
    assert policy._width_to_repeat == WIDTHS[-1] and not policy._undecided
