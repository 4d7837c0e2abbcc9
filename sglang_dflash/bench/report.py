"""Figures from passes: one row per data set, concurrency and arm, in JSON, a table or Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sglang_dflash.bench.gate import Runs, differences
from sglang_dflash.bench.load import OURS, VLLMS, Answer, Pass
from sglang_dflash.bench.settings import EmbeddedPair, GivenPair, ResolvedSettings, RunningServers
from sglang_dflash.core.acceptance_length import VerifySteps

COLUMNS = {
    "dataset": "data set",
    "concurrency": "concurrency",
    "arm": "arm",
    "output_tok_s": "output tok/s",
    "ratio": "ratio",
    "ttft_ms": "TTFT ms (p95)",
    "tpot_ms": "TPOT ms (p95)",
    "acceptance_length": "acceptance length",
}
NOTE = "both models memorized the text of demo and were not trained on that of stdlib"
ONE_BY_ONE, IN_TURNS = "one server after another", "all servers at once, arms taking turns"


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` (0 to 1) of the values lie, linearly interpolated."""
    ordered = sorted(values)
    at = fraction * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def row(passes: list[Pass]) -> dict[str, Any]:
    """Figures of one arm at one concurrency over all rounds.

    Times are medians and 95th percentiles in milliseconds. Tokens per verify step that vLLM
    counted have a key of their own.
    """
    answers = [answer for one in passes for turns in one.answers for answer in turns]
    first = [1000 * answer.first_token_s for answer in answers]
    later = [1000 * answer.per_token_s for answer in answers if answer.per_token_s is not None]
    tokens, seconds = sum(one.tokens for one in passes), sum(one.seconds for one in passes)
    length = sum((one.speculation for one in passes), VerifySteps()).acceptance_length
    length = None if length is None else round(length, 3)
    definition = VLLMS if any(one.definition == VLLMS for one in passes) else OURS
    by_definition = {OURS: None, definition: length}
    return {
        "output_tok_s": round(tokens / seconds, 2),
        "ttft_ms": round(statistics.median(first), 1),
        "ttft_ms_p95": round(percentile(first, 0.95), 1),
        "tpot_ms": round(statistics.median(later), 2) if later else None,
        "tpot_ms_p95": round(percentile(later, 0.95), 2) if later else None,
        **by_definition,
        "answers": len(answers),
        "tokens": tokens,
        "seconds": round(seconds, 3),
    }


def rows(runs: Runs, arms: list[str]) -> list[dict[str, Any]]:
    """All rows. `ratio`: throughput over the first arm's at the same data set and concurrency."""
    found = []
    for (dataset, concurrency), passes in runs.items():
        figures = {arm: row(passes[arm]) for arm in arms}
        for arm, one in figures.items():
            # From the counts, not from rounded rates.
            rate, base = (
                one["tokens"] / one["seconds"],
                figures[arms[0]]["tokens"] / figures[arms[0]]["seconds"],
            )
            found.append(
                {
                    "dataset": dataset,
                    "concurrency": concurrency,
                    "arm": arm,
                    "ratio": round(rate / base, 3),
                    **one,
                }
            )
    return found


def summarize(
    settings: ResolvedSettings,
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
        "note": NOTE if settings.model else None,
        "hardware": hardware,
        "dtype": settings.dtype,
        "arms": arms,
        "prompts": prompts,
        "max_new_tokens": settings.max_new_tokens,
        "rounds": settings.rounds,
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
    settings: ResolvedSettings, arms: list[str], differing: dict[str, int] | None, answers: int
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


def _model(settings: ResolvedSettings) -> str:
    match settings.served:
        case RunningServers(servers):
            return "as served at " + ", ".join(f"{name}={url}" for name, url in servers)
        case GivenPair(target, draft):
            return f"{target} with draft {draft}"
        case EmbeddedPair(kind):
            return f"embedded {kind} pair"


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
    ]
    if result["below_simulated_acceptance"]:
        arms = ", ".join(result["below_simulated_acceptance"])
        lines.insert(
            1, f"simulated acceptance: not reached by {arms}; the table shows what was reached"
        )
    if result["prefix_cache_kept"]:
        arms = ", ".join(result["prefix_cache_kept"])
        lines.append(f"prefix cache: could not be emptied between passes on {arms}")
    return lines


def _columns(result: dict[str, Any]) -> dict[str, str]:
    return (
        COLUMNS
        if result["simulated_acceptance"] is None
        else {**COLUMNS, "acceptance_length": "simulated acceptance length"}
    )


def _cells(one: dict[str, Any]) -> list[str]:
    def both(name: str) -> str:
        return "-" if one[name] is None else f"{one[name]} ({one[f'{name}_p95']})"

    shown = {
        **one,
        "ratio": f"{one['ratio']}x",
        "ttft_ms": both("ttft_ms"),
        "tpot_ms": both("tpot_ms"),
    }
    if VLLMS in one:
        shown["acceptance_length"] = f"{one[VLLMS]} (vLLM's count)"
    return ["-" if shown[name] is None else str(shown[name]) for name in COLUMNS]


def table(result: dict[str, Any]) -> Table:
    """For reading on a terminal."""
    found, last = Table(), None
    for name, title in _columns(result).items():
        found.add_column(title, justify="left" if name in ("dataset", "arm") else "right")
    for one in result["rows"]:
        place = one["dataset"], one["concurrency"]
        if last is not None and place != last:
            found.add_section()
        found.add_row(*_cells(one))
        last = place
    return found


def markdown(result: dict[str, Any]) -> str:
    """Card and table for a file, with the picture beside it."""
    lines = [
        *(f"- {line}" for line in card(result)),
        "",
        f"| {' | '.join(_columns(result).values())} |",
        "|---" * len(COLUMNS) + "|",
    ]
    lines += [f"| {' | '.join(_cells(one))} |" for one in result["rows"]]
    return "\n".join([*lines, "", "![throughput by concurrency](throughput.png)", ""])
