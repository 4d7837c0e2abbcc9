"""What a long context costs the drafter under a window.

Step time at 16k tokens over 1k, and prefill over plain decoding's. The step time is what the worker
reports for propose and commit, that is, all but the target's forward. Both servers run at once in
turns; the server that waits sleeps.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.conversations import long_text
from experiments.runner import Arms, Experiment, Progress, all_at_once, option, take_turns
from sglang_dflash.bench.server_config import demo_config
from sglang_dflash.facts.embedded import demo_pair

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

WINDOW, SHORT, LONG, NEW_TOKENS = 512, 1024, 16384, 32


@dataclass(frozen=True)
class Options:
    model: str = option("dense", "which embedded pair")
    repetitions: int = option(30, "measured requests per context length")
    prefills: int = option(5, "measured prefills per arm")


class Measured(NamedTuple):
    """Seconds: prefill by arm, and the draft side of a step by context length."""

    prefill: dict[str, list[float]]
    step: dict[str, list[float]]


def arms(options: Options) -> Arms:
    pair = demo_pair(options.model)
    plain, dflash = (
        demo_config(pair, dflash=dflash).with_flags({"--max-total-tokens": 4 * LONG})
        for dflash in (False, True)
    )
    return {
        "plain": plain,
        "dflash": dflash.with_flags({"--speculative-draft-window-size": WINDOW}),
    }


def workload(arms: Arms, options: Options, progress: Progress) -> Measured:
    ids = long_text(demo_pair(options.model), LONG)
    prompts = {"short": ids[:SHORT], "long": ids}
    with all_at_once(arms) as servers:

        def prefill(name: str, i: int) -> float:
            # A new first token every round: nothing is found cached.
            return prefill_seconds(servers[name], [100 + i, *ids[1:]])

        def step(name: str, _: int) -> float:
            return draft_side_seconds(servers["dflash"], prompts[name])

        prefills = take_turns(
            servers, options.prefills, prefill, lambda line, *of: progress(f"prefill, {line}", *of)
        )
        take_turns(prompts, 1, step, lambda line, *of: progress(f"warm-up, {line}", *of))
        return Measured(prefills, take_turns(prompts, options.repetitions, step, progress))


def prefill_seconds(server: Server, prompt: list[int]) -> float:
    began = time.perf_counter()
    server.generate(prompt, temperature=0, max_new_tokens=1, ignore_eos=True)
    return time.perf_counter() - began


def draft_side_seconds(server: Server, prompt: list[int]) -> float:
    """Mean time of propose and commit per decode step while one request is answered."""
    before = server.dflash()
    server.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    after = server.dflash()
    seconds = sum(
        after["host_seconds"][part] - before["host_seconds"].get(part, 0.0)
        for part in ("propose", "commit")
    )
    return seconds / (after["decode_steps"] - before["decode_steps"])


def report(measured: Measured, options: Options) -> dict[str, Any]:
    prefill, step = measured
    return {
        "window": WINDOW,
        "short": SHORT,
        "long": LONG,
        "prefill": {
            "plain_s": round(statistics.median(prefill["plain"]), 4),
            "dflash_s": round(statistics.median(prefill["dflash"]), 4),
            "ratio": ratio(prefill["dflash"], prefill["plain"]),
            "rounds": options.prefills,
        },
        "draft_side_step": {
            "short_ms": round(1000 * statistics.median(step["short"]), 4),
            "long_ms": round(1000 * statistics.median(step["long"]), 4),
            "ratio": ratio(step["long"], step["short"]),
            "repetitions": options.repetitions,
        },
    }


def ratio(times: list[float], base: list[float]) -> float:
    """Median of the round-by-round ratios."""
    return round(statistics.median(a / b for a, b in zip(times, base, strict=True)), 4)


EXPERIMENT = Experiment(
    name="long_context",
    description=__doc__,
    options=Options,
    arms=arms,
    workload=workload,
    report=report,
)
