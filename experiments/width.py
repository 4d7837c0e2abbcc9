"""Adaptive verify width against plain decoding and fixed widths, at points chosen beforehand.

All servers of a pair run side by side and take turns, each round with other prompts; plain decoding
runs twice, and the second one shows the noise. "width 1" never drafts: it shows what our worker
costs without drafts. Greedy, float32; the exit status is 1 if an arm's outputs differ from plain
decoding's.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments import texts
from experiments.runner import all_at_once, take_turns
from sglang_dflash.bench import load
from sglang_dflash.bench.datasets import Prompt, token_encoder
from sglang_dflash.bench.load import Answer, Endpoint, Pass
from sglang_dflash.bench.server import FlagValue, Server, ServerConfig, demo_config
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.step.extension import Extension

NEW_TOKENS, WARM_TOKENS, NARROW = 48, 16, 4
# Of many requests at a time, answers are shorter or longer by so many tokens. If all had one
# length, requests of plain decoding would begin and end together, and their prompts be computed in
# one batch; those of other arms would not.
MANY, SPREAD = 16, 16
PLAIN, AGAIN, WIDTH_1, ADAPTIVE = "plain", "plain again", "width 1", "adaptive"
# Prompts of a pass by concurrency, or by data set. Passes are short, because the machine's speed
# drifts. But of many requests at a time there are three times as many prompts: arms whose answers
# differ in the number of steps would else spend different shares of a pass with few requests left.
# "alternating" has two phases of each kind.
PROMPTS = {1: 4, 4: 8, 16: 48, 32: 96}
PROMPTS_OF_SET = {"alternating": 16, "agents": 6, "unseen-long": 4}
# By pair, the KV tokens of each server.
KV_TOKENS = {"dense": 16_384, "code": 40_960, "hybrid": 16_384}
REQUESTS = 32


class Point(NamedTuple):
    """A pair, a data set (`texts.load`), and the number of requests at a time."""

    pair: str
    dataset: str
    concurrency: int

    def __str__(self) -> str:
        return f"{self.pair}, {self.dataset}, {self.concurrency} at a time"


POINTS = (
    Point("dense", "demo", 1),
    Point("dense", "demo", 16),
    Point("dense", "stdlib", 1),
    Point("dense", "stdlib", 16),
    Point("dense", "random", 1),
    Point("dense", "random", 32),
    Point("dense", "agents", 4),
    Point("dense", "alternating", 1),
    Point("code", "unseen", 1),
    Point("code", "unseen", 16),
    Point("code", "unseen-long", 4),
    Point("hybrid", "demo", 4),
    Point("hybrid", "stdlib", 1),
    Point("hybrid", "stdlib", 32),
    Point("hybrid", "agents", 4),
)


@dataclass(frozen=True)
class Options:
    rounds: int = setting(16, "measured passes per arm and point, at least 2 (default: {default})")
    points: str = setting("all", "numbers of points, such as 0,3; all by default")


class Measured(NamedTuple):
    """One point: passes by arm; of the adaptive server the steps by width, and the seconds that it
    spent on choosing widths and learning from their outcomes."""

    passes: dict[str, list[Pass]]
    width_steps: dict[str, int]
    deciding_seconds: float


def server(kind: str, flags: dict[str, FlagValue] | None) -> ServerConfig:
    pair = demo_pair(kind)
    limits: dict[str, FlagValue] = {
        "--max-total-tokens": KV_TOKENS[kind],
        "--max-running-requests": REQUESTS,
        # To stream the whole text with every step costs the slower arm more than the faster one.
        "--incremental-streaming-output": True,
    }
    if pair.is_hybrid:
        limits["--max-mamba-cache-size"] = 4 * REQUESTS
    return demo_config(pair, dflash=flags is not None).with_flags({**limits, **(flags or {})})


class NeverDrafts(WidthPolicy):
    """Width 1 in every step; the draft KV cache is kept up nonetheless."""

    drafts = False

    def __init__(self, verify_block: int) -> None:
        self.widths = (1, verify_block)

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        return 1


def never_drafts(_target_worker: Any) -> Any:
    """For --speculative-dflash-extension."""
    return Extension(width_policy=NeverDrafts)


ARMS: tuple[tuple[str, dict[str, FlagValue] | None], ...] = (
    (PLAIN, None),
    (AGAIN, None),
    (WIDTH_1, {"--speculative-dflash-extension": "experiments.width:never_drafts"}),
    ("fixed 8", {}),
    (f"fixed {NARROW}", {"--speculative-num-draft-tokens": NARROW}),
    (ADAPTIVE, {"--speculative-dflash-width": "adaptive"}),
)


def chosen_points(options: Options) -> list[Point]:
    """Raises ConfigError: an option is out of range."""
    if options.rounds < 2:
        raise ConfigError("rounds", options.rounds, "a lower bound needs at least 2")
    if options.points == "all":
        return list(POINTS)
    known = {str(number): point for number, point in enumerate(POINTS)}
    numbers = options.points.split(",")
    for number in numbers:
        if number not in known:
            required = f"give numbers from 0 to {len(POINTS) - 1}, or all"
            raise ConfigError("points", number, required)
    return [known[number] for number in numbers]


def run(options: Options) -> dict[str, Any]:
    chosen, rows = chosen_points(options), []
    for kind in KV_TOKENS:
        points = [point for point in chosen if point.pair == kind]
        if not points:
            continue
        with all_at_once({name: server(kind, flags) for name, flags in ARMS}) as servers:
            for point in points:
                rows.append(row(point, measure(point, servers, options.rounds)))
                # A run takes half an hour.
                print(*table({"points": rows[-1:]}), sep="\n", file=sys.stderr)
    return {
        "rounds": options.rounds,
        "new_tokens": NEW_TOKENS,
        "new_tokens_of_many": [NEW_TOKENS - SPREAD, NEW_TOKENS, NEW_TOKENS + SPREAD],
        "points": rows,
    }


def measure(point: Point, servers: dict[str, Server], rounds: int) -> Measured:
    count = PROMPTS_OF_SET.get(point.dataset, PROMPTS[point.concurrency])
    prompts = texts.load(point.dataset, rounds * count, point.pair)
    endpoints = {name: load.SGLang(server.url) for name, server in servers.items()}
    spread = SPREAD if point.concurrency >= MANY else 0
    full, warm = asking(point.pair, NEW_TOKENS, spread), asking(point.pair, WARM_TOKENS)
    for to in endpoints.values():
        load.run(to, turn(prompts, 0, point.concurrency), point.concurrency, warm)
    steps, deciding = widths(servers[ADAPTIVE])

    def answered(name: str, at: int) -> Pass:
        endpoints[name].flush()
        return load.run(endpoints[name], turn(prompts, at, count), point.concurrency, full)

    passes = take_turns(endpoints, rounds, answered, f"{point}: ")
    steps_after, deciding_after = widths(servers[ADAPTIVE])
    taken = {width: count - steps.get(width, 0) for width, count in steps_after.items()}
    return Measured(passes, taken, deciding_after - deciding)


def turn(prompts: Sequence[Prompt], at: int, count: int) -> list[Prompt]:
    """The prompts of pass `at`; after the last prompt comes the first."""
    return [prompts[(at * count + i) % len(prompts)] for i in range(count)]


def asking(
    kind: str, tokens: int, spread: int = 0
) -> Callable[[Endpoint, Prompt, list[str]], Answer]:
    """Asks for `tokens` new tokens, or for `spread` less or more: the same for the same prompt."""
    encode = token_encoder(str(demo_pair(kind).target))

    def ask(to: Endpoint, prompt: Prompt, answers: list[str]) -> Answer:
        ids = encode(prompt, answers)
        return to.ask(ids, tokens + (sum(ids) % 3 - 1) * spread, ignore_eos=True)

    return ask


def widths(server: Server) -> tuple[dict[str, int], float]:
    """Steps by width so far, and the seconds of the host that choosing and learning took."""
    shown = server.dflash()
    spent = (shown["host_seconds"].get(phase, 0.0) for phase in ("choose_width", "learn_width"))
    return {str(width): steps for width, steps in shown["width_steps"].items()}, sum(spent)


# ---- the report


def row(point: Point, found: Measured) -> dict[str, Any]:
    speeds = {name: [p.tokens_per_second for p in passes] for name, passes in found.passes.items()}
    # Two passes of plain decoding per round halve its noise.
    both = zip(speeds[PLAIN], speeds[AGAIN], strict=True)
    plain = [2 / (1 / a + 1 / b) for a, b in both]
    fixed = {name: of for name, of in speeds.items() if name.startswith("fixed")}
    best = max(fixed, key=lambda name: statistics.median(fixed[name]))
    fixed_8 = sum((of.speculation for of in found.passes["fixed 8"]), VerifySteps())
    outputs = {name: [p.ids for p in passes] for name, passes in found.passes.items()}
    return {
        **point._asdict(),
        "plain_tokens_per_second": round(statistics.median(plain), 1),
        "plain_step_ms": round(step_ms(found.passes[PLAIN]), 2),
        "over_plain": {name: ratio(of, plain) for name, of in speeds.items() if name != PLAIN},
        "noise": ratio(speeds[AGAIN], speeds[PLAIN]),
        "best_fixed": best,
        "over_best_fixed": ratio(speeds[ADAPTIVE], speeds[best]),
        "acceptance_length": round(fixed_8.acceptance_length or 0.0, 3),
        "width_steps": found.width_steps,
        "deciding_share": round(
            found.deciding_seconds / sum(p.seconds for p in found.passes[ADAPTIVE]), 4
        ),
        "identical": all(of == outputs[PLAIN] for of in outputs.values()),
    }


def step_ms(passes: Sequence[Pass]) -> float:
    """Median over answers of the mean time between two tokens, in milliseconds."""
    answers = (answer for one in passes for answer in one.every)
    return 1000 * statistics.median(answer.per_token_s or 0.0 for answer in answers)


def ratio(speeds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Geometric mean of the round-by-round ratios and its one-sided 95 % lower bound, by Student's
    t on their logarithms."""
    from scipy.stats import t

    logs = [math.log(a / b) for a, b in zip(speeds, base, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    lower = mean - float(t.ppf(0.95, len(logs) - 1)) * error
    return {"ratio": round(math.exp(mean), 3), "lower": round(math.exp(lower), 3)}


def table(result: dict[str, Any]) -> list[str]:
    arms = (WIDTH_1, "fixed 8", f"fixed {NARROW}", ADAPTIVE)
    lines = [
        f"{'pair':8}{'data set':13}{'c':>3}{'step ms':>9}{'noise':>7}"
        + "".join(f"{arm:>10}" for arm in arms)
        + f"{'at least':>10}{'over best':>11}"
    ]
    for one in result["points"]:
        over = one["over_plain"]
        lines.append(
            f"{one['pair']:8}{one['dataset']:13}{one['concurrency']:3}{one['plain_step_ms']:9.2f}"
            f"{one['noise']['ratio']:7.3f}"
            + "".join(f"{over[arm]['ratio']:10.3f}" for arm in arms)
            + f"{over[ADAPTIVE]['lower']:10.3f}{one['over_best_fixed']['ratio']:11.3f}"
        )
    return lines


def failure(result: dict[str, Any]) -> str | None:
    for one in result["points"]:
        if not one["identical"]:
            where = f"{one['pair']}, {one['dataset']}, {one['concurrency']} at a time"
            return f"{where}: outputs are not plain decoding's"
    return None
