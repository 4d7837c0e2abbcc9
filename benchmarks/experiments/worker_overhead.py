"""Our worker against SGLang's built-in one, or replay against snapshots, or against itself.

Same platform, same pair, same prompts, greedy. Both servers run at once in turns; the server that
waits sleeps. The two must give the same outputs, or nothing is reported. `--against itself` shows
how far the ratios of two equal servers are from 1.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.runner import Arms, Experiment, Progress, all_at_once, option, take_turns
from sglang_dflash.bench import measure
from sglang_dflash.bench.server_config import FlagValue, demo_config
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.core.acceptance_length import VerifySteps

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

NEW_TOKENS = 96
LEVELS = (1, 8)
AGAINST: dict[str, dict[str, FlagValue]] = {
    "builtin": {"--speculative-dflash-worker": "builtin"},
    "snapshot": {"--speculative-dflash-recurrent-rollback": "snapshot"},
    "itself": {},
}

# Arm -> one run per round.
Runs = dict[str, list[measure.Run]]


@dataclass(frozen=True)
class Options:
    model: str = option("dense", "which embedded pair")
    against: str = option("builtin", "what ours is compared with", choices=AGAINST)
    rounds: int = option(5, "measured passes per arm and concurrency")


def arms(options: Options) -> Arms:
    ours = demo_config(demo_pair(options.model), dflash=True)
    return {"ours": ours, options.against: ours.with_flags(AGAINST[options.against])}


def workload(arms: Arms, options: Options, progress: Progress) -> dict[int, Runs]:
    """By concurrency. Raises RuntimeError if the two servers' outputs differ."""
    prompts = demo_pair(options.model).prompts
    with all_at_once(arms) as servers:
        return {n: run_level(servers, prompts, n, options.rounds, progress) for n in LEVELS}


def run_level(
    servers: dict[str, Server],
    prompts: list[str],
    concurrency: int,
    rounds: int,
    progress: Progress,
) -> Runs:
    prompts = prompts[: max(4, 2 * concurrency)]

    def one_pass(name: str, _: int) -> measure.Run:
        return measure.run(servers[name], prompts, concurrency, NEW_TOKENS)

    def at_a_time(step: str, done: int, of: int) -> None:
        progress(f"{concurrency} at a time, {step}", done, of)

    take_turns(servers, 1, one_pass, lambda step, *of: at_a_time(f"warm-up, {step}", *of))
    runs = take_turns(servers, rounds, one_pass, at_a_time)
    if any(a.outputs != b.outputs for a, b in zip(*runs.values(), strict=True)):
        raise RuntimeError("the two servers' outputs differ: no figure without exactness")
    return runs


def report(runs: dict[int, Runs], _: Options) -> dict[str, Any]:
    rows = {f"concurrency_{level}": compare(by_arm) for level, by_arm in runs.items()}
    return {"new_tokens": NEW_TOKENS, **rows}


def compare(runs: Runs) -> dict[str, Any]:
    """Medians per arm; medians, least and greatest of the round-by-round ratios (ours / other)."""
    pairs = list(zip(*runs.values(), strict=True))
    return {
        **{name: figures(many) for name, many in runs.items()},
        **spread("step_time_ratio", [a.step_ms / b.step_ms for a, b in pairs]),
        **spread("throughput_ratio", [a.tokens_per_second / b.tokens_per_second for a, b in pairs]),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    of = {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {key: round(value, 4) for key, value in of.items()}


def figures(runs: list[measure.Run]) -> dict[str, float]:
    counts = sum((r.counts for r in runs), VerifySteps())
    return {
        "step_ms": round(statistics.median(r.step_ms for r in runs), 3),
        "tokens_per_second": round(statistics.median(r.tokens_per_second for r in runs), 2),
        "acceptance_length": round(counts.acceptance_length or 1.0, 3),
    }


EXPERIMENT = Experiment(
    name="worker_overhead",
    description=__doc__,
    options=Options,
    arms=arms,
    workload=workload,
    report=report,
)
