"""What drafts are worth to requests with a presence penalty, and whether outputs stay the target's.

Two servers of the code pair: plain decoding, and ours. Greedy, float32, one request at a time, on
text that neither model has seen. The exit status is 1 if outputs differ.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from experiments.runner import Arms, Experiment, Progress, all_at_once, option, take_turns
from experiments.width import answer_ids, asking
from sglang_dflash.bench.load import Pass, Sampling, SGLang, run
from sglang_dflash.bench.server_config import demo_config
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

PAIR, DATASET, PROMPTS, NEW_TOKENS = "code", "unseen", 8, 96
PLAIN, OURS = "plain", "ours"


@dataclass(frozen=True)
class Options:
    rounds: int = option(5, "measured passes per arm and penalty")
    penalty: float = option(1.5, "presence penalty, beside 0")


def arms(_: Options) -> Arms:
    pair = demo_pair(PAIR)
    return {PLAIN: demo_config(pair, dflash=False), OURS: demo_config(pair, dflash=True)}


def workload(
    arms: Arms, options: Options, progress: Progress
) -> dict[float, dict[str, list[Pass]]]:
    from sglang_dflash.bench.datasets import default_cache, load

    if not -2 <= options.penalty <= 2:
        raise ConfigError(f"--penalty: {options.penalty}; give a number from -2 to 2")
    count = PROMPTS * options.rounds
    prompts = load(DATASET, count, model=PAIR, cache=default_cache())
    found, ask = {}, asking(PAIR, NEW_TOKENS)
    with all_at_once(arms) as servers:
        for penalty in (0.0, options.penalty):
            sampling = Sampling(presence_penalty=penalty)

            def one_round(name: str, at: int, sampling: Sampling = sampling) -> Pass:
                to = SGLang(servers[name].url, sampling)
                to.flush()
                return run(to, prompts[at * PROMPTS : (at + 1) * PROMPTS], 1, ask)

            take_turns(servers, 1, one_round, lambda line, *of: progress(f"warm-up, {line}", *of))
            found[penalty] = take_turns(servers, options.rounds, one_round, progress)
    return found


def report(found: dict[float, dict[str, list[Pass]]], options: Options) -> dict[str, Any]:
    return {
        "rounds": options.rounds,
        "prompts": PROMPTS * options.rounds,
        "new_tokens": NEW_TOKENS,
        "penalties": [
            {"presence_penalty": penalty, **{name: row(name, passes) for name in passes}}
            for penalty, passes in found.items()
        ],
    }


def row(name: str, passes: dict[str, list[Pass]]) -> dict[str, Any]:
    """One arm's figures, and the number of its answers that are not plain decoding's."""
    rounds = list(zip(passes[name], passes[PLAIN], strict=True))
    ratios = [(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in rounds]
    speculation = [one.speculation for one in passes[name]]
    steps, tokens = sum(s.steps for s in speculation), sum(s.tokens for s in speculation)
    pairs = [pair for a, b in rounds for pair in zip(answer_ids(a), answer_ids(b), strict=True)]
    return {
        "over_plain": round(statistics.median(ratios), 3),
        "over_plain_min": round(min(ratios), 3),
        "over_plain_max": round(max(ratios), 3),
        "acceptance_length": round(tokens / steps, 3) if steps else None,
        "differing_answers": sum(a != b for a, b in pairs),
    }


def failure(result: dict[str, Any]) -> str | None:
    wrong = [
        one["presence_penalty"] for one in result["penalties"] if one[OURS]["differing_answers"]
    ]
    return f"outputs are not plain decoding's at presence penalty {wrong}" if wrong else None


EXPERIMENT = Experiment(
    name="penalties",
    description=__doc__,
    options=Options,
    arms=arms,
    workload=workload,
    report=report,
    failure=failure,
)
