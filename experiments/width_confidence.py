"""Is the drafter's confidence worth more than outcomes for choosing verify widths?

The adaptive width expects of a request what its earlier steps had accepted. The drafter's own
probability of each draft (confidence) could tell more, of the step that it was drafted in, or of
the next one. One server records confidences and outcomes with whole blocks, another one the cost of
each width; then widths are chosen again, with either knowledge.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments import width
from experiments.runner import Arms, Experiment, Progress, all_at_once, option
from experiments.width_replay import BEFORE, NOW, OUTCOMES, Recorded, Replay, is_full
from sglang_dflash.facts.errors import ConfigError

POINTS = (
    width.Point("dense", "demo", 1),
    width.Point("dense", "stdlib", 1),
    width.Point("dense", "alternating", 1),
    width.Point("code", "unseen", 1),
    width.Point("code", "unseen", 16),
    width.Point("hybrid", "stdlib", 1),
    width.Point("hybrid", "stdlib", 4),
)


@dataclass(frozen=True)
class Options:
    prompts: int = option(60, "prompts of each point with one request at a time, at least 20")


class Measured(NamedTuple):
    """Steps with whole blocks, and seconds of a step by width from 1 to B."""

    steps: list[Recorded]
    costs: list[float]


def arms(_: Options) -> Arms:
    """All pairs' servers, `PAIR/record` and `PAIR/costs`."""
    return {
        f"{pair}/{arm}": width.server(
            pair, {"--speculative-dflash-extension": f"experiments.confidence:{arm}"}
        )
        for pair in width.KV_TOKENS
        for arm in ("record", "costs")
    }


def workload(arms: Arms, options: Options, progress: Progress) -> dict[width.Point, Measured]:
    if options.prompts < 20:
        raise ConfigError(f"--prompts: {options.prompts}; at least 20 tell something")
    found = {}
    for pair in width.KV_TOKENS:
        points = [point for point in POINTS if point.pair == pair]
        with all_at_once(width.of_pair(arms, pair)) as servers:
            for done, point in enumerate(points):
                progress(str(point), done, len(points))
                found[point] = measure(point, servers, options.prompts)
    return found


def measure(point: width.Point, servers: dict[str, Any], prompts: int) -> Measured:
    from sglang_dflash.bench import load
    from sglang_dflash.bench.datasets import default_cache
    from sglang_dflash.bench.datasets import load as prompts_of

    # Steps of many requests are fewer.
    count = prompts if point.concurrency == 1 else 4 * prompts
    chosen = prompts_of(point.dataset, count, model=point.pair, cache=default_cache())
    asked = width.asking(point.pair, width.NEW_TOKENS)

    def served(arm: str, key: str) -> list[Any]:
        """What the server recorded meanwhile."""
        before = len(servers[arm].dflash()[key])
        to = load.SGLang(servers[arm].url)
        to.flush()
        load.run(to, chosen, point.concurrency, asked)
        return list(servers[arm].dflash()[key][before:])

    steps = [Recorded(*step) for step in served("record", "recorded")]
    by_width = defaultdict(list)
    for requests, tokens, seconds in served("costs", "taken"):
        if is_full(requests, point.concurrency):
            by_width[tokens].append(seconds)
    widths = range(1, max(by_width, default=1) + 1)
    if not all(by_width[tokens] for tokens in widths) or not any(
        is_full(len(step.requests), point.concurrency) for step in steps
    ):
        raise ConfigError(f"--prompts: {prompts}; too few steps with most of the requests; {point}")
    return Measured(steps, [statistics.median(by_width[tokens]) for tokens in widths])


def report(measured: dict[width.Point, Measured], options: Options) -> dict[str, Any]:
    return {
        "prompts": options.prompts,
        "new_tokens": width.NEW_TOKENS,
        "points": [
            {
                **point._asdict(),
                "steps": len(found.steps),
                "step_ms": [round(1e3 * seconds, 2) for seconds in found.costs],
                **Replay(found.costs, point.concurrency).run(found.steps),
            }
            for point, found in measured.items()
        ],
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{'pair':8}{'data set':13}{'c':>3}  log loss: outcomes, now, before   "
        "speed over outcomes: now, foresight, ragged now"
    ]
    for one in result["points"]:
        losses = [one["predictions"][name]["log_loss"] for name in (OUTCOMES, NOW, BEFORE)]
        speeds = [one["speed_over_outcomes"][n] for n in (NOW, "foresight", f"{NOW}, ragged")]
        cells = "".join(f"{cell:8.3f}" for cell in (*losses, *speeds))
        lines.append(f"{one['pair']:8}{one['dataset']:13}{one['concurrency']:3}{cells}")
    return lines


EXPERIMENT = Experiment(
    name="width_confidence",
    description=__doc__,
    options=Options,
    arms=arms,
    workload=workload,
    report=report,
    table=table,
)
