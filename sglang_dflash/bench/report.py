"""Figures from passes: one row per data set, concurrency and arm, in JSON, a table or Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from sglang_dflash.bench.gate import Runs, differences
from sglang_dflash.bench.load import OURS, VLLMS, Answer, Pass
from sglang_dflash.bench.settings import BenchSettings
from sglang_dflash.drafting.acceptance_length import VerifySteps

TIMES = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "itl_ms": "ITL ms", "e2e_ms": "end to end ms"}
COLUMNS = {
    "dataset": "data set",
    "concurrency": "concurrency",
    "arm": "arm",
    "output_tok_s": "output tok/s (range)",
    "ratio": "ratio",
    "ttft_ms": "TTFT ms p50/p95/p99",
    "tpot_ms": "TPOT ms p50/p95/p99",
    "acceptance_length": "acceptance length",
}
NOTE = "both models memorized the text of demo and were not trained on that of stdlib"
ONE_BY_ONE, IN_TURNS = "one server after another", "all servers at once, arms taking turns"
# Fewer rounds do not show a spread. With 3 rounds of normal noise, two equal servers are told apart
# by `is_within_noise` in 1.4 % of comparisons; with 4 in 0.1 %.
LEAST_ROUNDS = 3


def percentiles(values: Sequence[float], name: str, digits: int) -> dict[str, float | None]:
    """Median, 95th and 99th percentile of times in seconds, in ms; None without values."""
    keys = percentile_keys(name)
    if not len(values):
        return dict.fromkeys(keys)
    found = 1000 * np.percentile(values, (50, 95, 99))
    return {key: round(float(value), digits) for key, value in zip(keys, found, strict=True)}


def percentile_keys(name: str) -> tuple[str, str, str]:
    """The keys of a time's median, 95th and 99th percentile in a row."""
    return name, f"{name}_p95", f"{name}_p99"


def row(passes: list[Pass]) -> dict[str, Any]:
    """Figures of one arm at one concurrency over all rounds.

    `output_tok_s` is the median over rounds, with the least and the most beside it. Times are of
    all answers, in milliseconds: to the first token, per token after it (a mean per answer),
    between tokens, and of whole answers. Tokens per verify step that vLLM counted have a key of
    their own.
    """
    answers = [answer for one in passes for turns in one.answers for answer in turns]
    rates = [one.tokens / one.seconds for one in passes]
    later = [answer.per_token_s for answer in answers if answer.per_token_s is not None]
    length = sum((one.speculation for one in passes), VerifySteps()).acceptance_length
    definition = VLLMS if any(one.definition == VLLMS for one in passes) else OURS
    by_definition = {OURS: None, definition: None if length is None else round(length, 3)}
    return {
        "output_tok_s": round(float(np.median(rates)), 2),
        "output_tok_s_min": round(min(rates), 2),
        "output_tok_s_max": round(max(rates), 2),
        **percentiles([answer.first_token_s for answer in answers], "ttft_ms", 1),
        **percentiles(later, "tpot_ms", 2),
        **percentiles([gap for answer in answers for gap in answer.gaps_s], "itl_ms", 2),
        **percentiles([answer.seconds for answer in answers], "e2e_ms", 1),
        **by_definition,
        "answers": len(answers),
        "tokens": sum(one.tokens for one in passes),
        "seconds": round(sum(one.seconds for one in passes), 3),
    }


def is_within_noise(a: Sequence[float], b: Sequence[float]) -> bool | None:
    """Whether two arms' values over rounds do not show a difference.

    They do if their medians are farther apart than their two ranges (largest less smallest value)
    together. None if there are fewer than `LEAST_ROUNDS` of either.
    """
    if min(len(a), len(b)) < LEAST_ROUNDS:
        return None
    return bool(abs(np.median(a) - np.median(b)) <= np.ptp(a) + np.ptp(b))


def rows(runs: Runs, arms: list[str]) -> list[dict[str, Any]]:
    """All rows.

    `ratio`: median throughput over the first arm's at the same data set and concurrency;
    `within_noise`: whether that is no difference (`is_within_noise`), None for the first arm.
    """
    found = []
    for (dataset, concurrency), passes in runs.items():
        # From the counts, not from rounded rates.
        rates = {arm: [one.tokens / one.seconds for one in passes[arm]] for arm in arms}
        base = rates[arms[0]]
        for arm in arms:
            found.append(
                {
                    "dataset": dataset,
                    "concurrency": concurrency,
                    "arm": arm,
                    "ratio": round(float(np.median(rates[arm]) / np.median(base)), 3),
                    "within_noise": None if arm == arms[0] else is_within_noise(rates[arm], base),
                    **row(passes[arm]),
                }
            )
    return found


def summarize(
    settings: BenchSettings,
    arms: list[str],
    prompts: dict[str, int],
    runs: Runs,
    kept_prefixes: list[str],
    hardware: dict[str, Any],
) -> dict[str, Any]:
    """The whole report as one object."""
    simulated = settings.simulated_acceptance
    differing = None if simulated is not None else _differing(runs, arms)
    return {
        "outputs": _outputs(
            settings,
            arms,
            differing,
            sum(len(one.answers) for by_arm in runs.values() for one in by_arm[arms[0]]),
        ),
        "identical": None if differing is None else not any(differing.values()),
        "differing_answers": differing,
        "simulated_acceptance": simulated,
        "below_simulated_acceptance": [] if simulated is None else _below(simulated, runs, arms),
        "command": settings.command,
        "model": _model(settings),
        "note": NOTE if settings.embedded else None,
        "hardware": hardware,
        "dtype": settings.dtype,
        "arms": arms,
        "prompts": prompts,
        "max_new_tokens": settings.max_new_tokens,
        "rounds": settings.rounds,
        "request_rate": settings.request_rate,
        "seed": settings.seed,
        "thinking": settings.thinking,
        "order": ONE_BY_ONE if settings.in_turn else IN_TURNS,
        "prefix_cache_kept": kept_prefixes,
        "rows": rows(runs, arms),
    }


def _differing(runs: Runs, arms: list[str]) -> dict[str, int]:
    found = dict.fromkeys(arms[1:], 0)
    for one in differences(runs, arms[0]):
        found[one.arm] += 1
    return found


def _below(length: float, runs: Runs, arms: list[str]) -> list[str]:
    """Arms with an answer that took more verify steps than `length` tokens per step allow."""

    def is_below(answer: Answer) -> bool:
        # A fraction is a mix of longer and shorter steps; the prefill gives the first token.
        return answer.verify_steps > math.ceil((answer.tokens - 1) / math.floor(length))

    passes = {arm: [one for by_arm in runs.values() for one in by_arm[arm]] for arm in arms}
    return [
        arm
        for arm in arms
        if any(is_below(answer) for one in passes[arm] for turns in one.answers for answer in turns)
    ]


def _outputs(
    settings: BenchSettings, arms: list[str], differing: dict[str, int] | None, answers: int
) -> str:
    """The report's first line. `differing`: None if outputs were not compared."""
    if differing is None:
        weights = "; weights are random, of the real shape" if settings.random_weights else ""
        of = f"acceptance is SIMULATED at {settings.simulated_acceptance:g} tokens per step"
        return f"{of}: outputs are not the target's and were not compared{weights}"
    if settings.dtype == "float32":
        return f"outputs: the same in all arms ({answers} answers each, greedy, float32)"
    counts = ", ".join(f"{arm} {count} of {answers}" for arm, count in differing.items())
    return (
        f"outputs may differ from {arms[0]}'s by near-ties of {settings.dtype}, "
        f"and did for: {counts or 'no other arm'}"
    )


def _model(settings: BenchSettings) -> str:
    if settings.base_url:
        return f"as served at {', '.join(settings.base_url)}"
    if settings.embedded:
        return f"embedded {settings.embedded} pair"
    return f"{settings.target} with draft {settings.draft}"


def card(result: dict[str, Any]) -> list[str]:
    """What was measured, on what and how, line by line."""
    machine, device = result["hardware"], result["hardware"]["accelerator"] or "CPU"
    sets = ", ".join(f"{count} of {name}" for name, count in result["prompts"].items())
    lines = [
        result["outputs"],
        f"model: {result['model']}" + (f" ({result['note']})" if result["note"] else ""),
        f"device: {device}; {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gib']} GiB",
        f"command: {result['command']}",
        f"date: {machine['date']}; sglang {machine['sglang']}, torch {machine['torch']}, "
        f"Python {machine['python']}",
        f"prompts: {sets}; at most {result['max_new_tokens']} new tokens each; "
        f"rounds: {result['rounds']}; {result['order']}",
        noise(result),
    ]
    if result["request_rate"] is not None:
        lines.append(
            f"arrivals: {result['request_rate']:g} requests per second, seed {result['seed']}; "
            "throughput is then limited by the arrivals"
        )
    if result["below_simulated_acceptance"]:
        arms = ", ".join(result["below_simulated_acceptance"])
        lines.insert(
            1, f"simulated acceptance: not reached by {arms}; the table shows what was reached"
        )
    if result["prefix_cache_kept"]:
        arms = ", ".join(result["prefix_cache_kept"])
        lines.append(f"prefix cache: could not be emptied between passes on {arms}")
    return lines


def noise(result: dict[str, Any]) -> str:
    """Which ratios are differences."""
    rounds = result["rounds"]
    if rounds < LEAST_ROUNDS:
        few = f"{rounds} round{'s' if rounds > 1 else ''}"
        return f"ratios: {few} show no spread; --rounds {LEAST_ROUNDS} or more do"
    return (
        "ratios: of medians over rounds; ~ is within noise: the medians are no farther apart than "
        "the two ranges together"
    )


def times(one: dict[str, Any], name: str) -> str | None:
    """Median and percentiles of one of `TIMES`, for reading; None if nothing was timed."""
    values = [one[key] for key in percentile_keys(name)]
    return None if None in values else "/".join(map(str, values))


def cells(result: dict[str, Any]) -> list[list[str]]:
    """The table, row by row: a text for each of `COLUMNS`."""
    found = []
    for one in result["rows"]:
        low, high = one["output_tok_s_min"], one["output_tok_s_max"]
        spread = f" ({low} to {high})" if result["rounds"] > 1 else ""
        shown = {
            **one,
            **{name: times(one, name) for name in TIMES},
            "output_tok_s": f"{one['output_tok_s']}{spread}",
            "ratio": f"{'~' if one['within_noise'] else ''}{one['ratio']}x",
        }
        if VLLMS in one:
            shown["acceptance_length"] = f"{one[VLLMS]} (vLLM's count)"
        found.append(["-" if shown[name] is None else str(shown[name]) for name in COLUMNS])
    return found


def titles(result: dict[str, Any]) -> list[str]:
    """The table's head."""
    simulated = result["simulated_acceptance"] is not None
    marked = {"acceptance_length": "simulated acceptance length"} if simulated else {}
    return list({**COLUMNS, **marked}.values())


def table(result: dict[str, Any]) -> Table:
    """For reading on a terminal."""
    found, last = Table(), None
    for name, title in zip(COLUMNS, titles(result), strict=True):
        found.add_column(title, justify="left" if name in ("dataset", "arm") else "right")
    for row in cells(result):
        if last is not None and row[:2] != last:
            found.add_section()
        found.add_row(*row)
        last = row[:2]
    return found


def markdown(result: dict[str, Any], picture: str | None = None) -> str:
    """Card and table for a file; `picture` is the name of a file beside it."""
    lines = [f"- {line}" for line in card(result)]
    lines += ["", f"| {' | '.join(titles(result))} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in cells(result)]
    if picture is not None:
        lines += ["", f"![throughput by concurrency]({picture})"]
    return "\n".join([*lines, ""])
