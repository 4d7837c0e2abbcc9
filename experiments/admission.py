"""What SGLang's wait for free request slots costs and saves: time to first token, throughput.

Two servers with our worker: `wait` as SGLang sets it up (a DFLASH server admits new requests only
when several slots are free), and `off` with --min-free-slots-delay 1. There are twice as many
clients as request slots; each sends its next request when its last is answered. The rounds take
turns; the server that waits sleeps.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.runner import Arms, Experiment, Progress, all_at_once, option, take_turns
from sglang_dflash.bench.load import Answer, SGLang
from sglang_dflash.bench.server_config import demo_config
from sglang_dflash.facts.embedded import demo_pair

SLOTS, REQUESTS = 16, 64


class Load(NamedTuple):
    """One round: output tokens per second, and every request's time to first token in seconds."""

    tokens_per_second: float
    first_token_s: list[float]


@dataclass(frozen=True)
class Options:
    rounds: int = option(4, "measured passes per arm")


def arms(_: Options) -> Arms:
    wait = demo_config(demo_pair("dense"), dflash=True).with_flags(
        {"--max-running-requests": SLOTS}
    )
    return {"off": wait.with_flags({"--min-free-slots-delay": 1}), "wait": wait}


def workload(arms: Arms, options: Options, progress: Progress) -> dict[str, list[Load]]:
    prompts = demo_pair("dense").prompts
    with all_at_once(arms) as servers:

        def one_round(name: str, _: int) -> Load:
            return load(SGLang(servers[name].url), prompts)

        take_turns(servers, 1, one_round, lambda step, *of: progress(f"warm-up, {step}", *of))
        return take_turns(servers, options.rounds, one_round, progress)


def load(endpoint: SGLang, prompts: list[str]) -> Load:
    """`REQUESTS` greedy requests of 16 to 96 new tokens from `2 * SLOTS` clients."""

    def one(i: int) -> Answer:
        # Every request has another first word: nothing is found cached.
        return endpoint.ask(f"{i} {prompts[i % len(prompts)]}", 16 + 16 * (i % 6), ignore_eos=True)

    if not endpoint.flush():
        raise RuntimeError("the prefix cache could not be emptied")
    began = time.perf_counter()
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        answers = list(pool.map(one, range(REQUESTS)))
    seconds = time.perf_counter() - began
    return Load(
        sum(answer.tokens for answer in answers) / seconds,
        [answer.first_token_s for answer in answers],
    )


def report(rounds: dict[str, list[Load]], _: Options) -> dict[str, Any]:
    from sglang.srt.managers.min_free_slots_delayer import resolve_min_free_slots

    pairs = list(zip(rounds["off"], rounds["wait"], strict=True))
    throughput = [off.tokens_per_second / wait.tokens_per_second for off, wait in pairs]
    first_token = [
        statistics.median(off.first_token_s) / statistics.median(wait.first_token_s)
        for off, wait in pairs
    ]
    return {
        "max_running_requests": SLOTS,
        "min_free_slots": resolve_min_free_slots(None, SLOTS, is_dflash_family=True),
        **{name: figures(loads) for name, loads in rounds.items()},
        "throughput_ratio": round(statistics.median(throughput), 4),
        "first_token_ratio": round(statistics.median(first_token), 4),
    }


def figures(rounds: list[Load]) -> dict[str, float]:
    firsts = [first for one in rounds for first in one.first_token_s]
    return {
        "tokens_per_second": round(statistics.median(one.tokens_per_second for one in rounds), 2),
        "first_token_s_median": round(statistics.median(firsts), 3),
        "first_token_s_p95": round(float(np.percentile(firsts, 95)), 3),
    }


EXPERIMENT = Experiment(
    name="admission",
    description=__doc__,
    options=Options,
    arms=arms,
    workload=workload,
    report=report,
)
