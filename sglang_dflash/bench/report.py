"""From passes to figures: one row per data set, concurrency and arm; as a card, a table, Markdown, or one JSON object."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sglang_dflash.bench.gate import Runs, differences
from sglang_dflash.bench.load import Answer, Pass
from sglang_dflash.bench.settings import Settings

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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, between two of them where it falls so."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def row(passes: list[Pass]) -> dict[str, Any]:
    """Figures of one arm at one concurrency, all rounds together; times in milliseconds (medians, and 95th percentiles)."""
    answers = [answer for one in passes for turns in one.answers for answer in turns]
    first = [1000 * answer.first_token_s for answer in answers]
    later = [1000 * answer.per_token_s for answer in answers if answer.per_token_s is not None]
    tokens, seconds = sum(one.tokens for one in passes), sum(one.seconds for one in passes)
    steps, committed = (sum(of) for of in zip(*(one.speculation for one in passes), strict=True))
    return {
        "output_tok_s": round(tokens / seconds, 2),
        "ttft_ms": round(statistics.median(first), 1),
        "ttft_ms_p95": round(percentile(first, 0.95), 1),
        "tpot_ms": round(statistics.median(later), 2) if later else None,
        "tpot_ms_p95": round(percentile(later, 0.95), 2) if later else None,
        "acceptance_length": round(committed / steps, 3) if steps else None,
        "answers": len(answers),
        "tokens": tokens,
        "seconds": round(seconds, 3),
    }


def rows(runs: Runs, arms: list[str]) -> list[dict[str, Any]]:
    """All rows; `ratio` is throughput over the first arm's in the same place."""
    found = []
    for (dataset, concurrency), passes in runs.items():
        figures = {arm: row(passes[arm]) for arm in arms}
        for arm, one in figures.items():
            # Of what was counted, not of what was rounded.
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


def summed_up(
    settings: Settings,
    arms: list[str],
    prompts: dict[str, int],
    runs: Runs,
    kept_prefixes: list[str],
    hardware: dict[str, Any],
) -> dict[str, Any]:
    """The whole report as one object, of resolved settings."""
    simulated = settings.simulated_acceptance
    differing = None if simulated is not None else _differing(runs, arms)
    return {
        "outputs": _outputs(
            settings,
            arms,
            differing,
            sum(len(p.answers) for by in runs.values() for p in by[arms[0]]),
        ),
        "identical": None if differing is None else not any(differing.values()),
        "differing_answers": differing,
        "simulated_acceptance": simulated,
        "below_simulated_acceptance": [] if simulated is None else _below(simulated, runs, arms),
        "command": settings.command,
        "model": _model(settings),
        "note": "both models have learnt the text of demo by heart, and have never seen that of stdlib"
        if settings.model
        else None,
        "hardware": hardware,
        "dtype": settings.dtype,
        "arms": arms,
        "prompts": prompts,
        "max_new_tokens": settings.max_new_tokens,
        "rounds": settings.rounds,
        "thinking": settings.thinking,
        "order": "one server after another"
        if settings.in_turn
        else "all servers at once, arms taking turns",
        "prefix_cache_kept": kept_prefixes,
        "rows": rows(runs, arms),
    }


def _differing(runs: Runs, arms: list[str]) -> dict[str, int]:
    found = dict.fromkeys(arms[1:], 0)
    for one in differences(runs, arms[0]):
        found[one.arm] += 1
    return found


def _below(length: float, runs: Runs, arms: list[str]) -> list[str]:
    """Arms of which an answer took more verify steps than steps of `length` tokens would have been."""

    def is_below(answer: Answer) -> bool:
        # A fraction is served as whole steps, longer and shorter ones; the first token comes from the prefill.
        return answer.verify_steps > math.ceil((answer.tokens - 1) / math.floor(length))

    passes = {arm: [one for by_arm in runs.values() for one in by_arm[arm]] for arm in arms}
    return [
        arm
        for arm in arms
        if any(is_below(answer) for one in passes[arm] for turns in one.answers for answer in turns)
    ]


def _outputs(
    settings: Settings, arms: list[str], differing: dict[str, int] | None, answers: int
) -> str:
    """The report's first line. `differing`: None where outputs were not compared."""
    if differing is None:
        weights = "; weights are random, of the real shape" if settings.random_weights else ""
        of = f"acceptance is SIMULATED at {settings.simulated_acceptance:g} tokens per step"
        return f"{of}: outputs are not the target's and were not compared{weights}"
    if settings.dtype == "float32":
        return f"outputs: the same in all arms ({answers} answers each, greedy, float32)"
    counts = ", ".join(f"{arm} {count} of {answers}" for arm, count in differing.items())
    return f"outputs may differ from {arms[0]}'s by near-ties of {settings.dtype}, and did for: {counts or 'no other arm'}"


def _model(settings: Settings) -> str:
    if settings.base_url:
        return "as served at " + ", ".join(settings.base_url)
    if settings.model is not None:
        return f"embedded {settings.model} pair"
    return f"{settings.target} with draft {settings.draft}"


def card(result: dict[str, Any]) -> list[str]:
    """What the figures are of, line by line."""
    machine = result["hardware"]
    sets = ", ".join(f"{count} of {name}" for name, count in result["prompts"].items())
    lines = [
        result["outputs"],
        f"model: {result['model']}" + (f" ({result['note']})" if result["note"] else ""),
        f"device: {machine['accelerator'] or 'CPU'}; {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB",
        f"command: {result['command']}",
        f"date: {machine['date']}; sglang {machine['sglang']}, torch {machine['torch']}, Python {machine['python']}",
        f"prompts: {sets}; at most {result['max_new_tokens']} new tokens each; rounds: {result['rounds']}; {result['order']}",
    ]
    if result["below_simulated_acceptance"]:
        lines.insert(
            1,
            f"simulated acceptance: not reached by {', '.join(result['below_simulated_acceptance'])}; the table says what was",
        )
    if result["prefix_cache_kept"]:
        lines.append(
            f"prefix cache: could not be emptied between passes on {', '.join(result['prefix_cache_kept'])}"
        )
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
