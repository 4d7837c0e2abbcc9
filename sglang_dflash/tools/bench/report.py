"""Figures from passes: one row per data set, concurrency and arm, in JSON or Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_dflash.common.machine import hardware
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.serving.metrics.server_info import NOT_KNOWN
from sglang_dflash.tools.bench.compiled import count_compilations
from sglang_dflash.tools.bench.differences import NearTie, Runs, differences
from sglang_dflash.tools.bench.load import SEEDED, Answer, BenchPass
from sglang_dflash.tools.bench.settings import WIDTH, BenchSettings
from sglang_dflash.tools.demo_pairs.pairs import kinds


@dataclass
class Measurements:
    """The measurements of a run.

    Attributes:
        kept_prefixes: arms whose prefix cache could not be emptied between passes.
        servers: arm -> labels that its server reports (`load.SGLang.describe`).
        start_s: arm -> seconds until its server was ready, for servers started here.
        at_once: whether all servers ran at once.
        near_ties: arm -> check of the first differing token, if its server could be asked.
    """

    runs: Runs = field(default_factory=dict)
    kept_prefixes: list[str] = field(default_factory=list)
    servers: dict[str, dict[str, str]] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    at_once: bool = True
    near_ties: dict[str, NearTie] = field(default_factory=dict)


TIMES = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms"}
# Fewer rounds do not show a spread. With 3 rounds of normal noise, two equal servers are told apart
# by `is_within_noise` in 1.4 % of comparisons; with 4 in 0.1 %.
LEAST_ROUNDS = 3


def percentile_keys(name: str) -> tuple[str, str, str]:
    """The keys of a time's median, 95th and 99th percentile in a row."""
    return name, f"{name}_p95", f"{name}_p99"


def percentiles(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Median, 95th and 99th percentile of `TIMES` over answers, in ms; None if nothing was
    timed."""
    values = {
        "ttft_ms": [answer.first_token_s for answer in answers],
        "tpot_ms": [a.per_token_s for a in answers if a.per_token_s is not None],
    }
    figures: dict[str, float | None] = {}
    for name in TIMES:
        keys = percentile_keys(name)
        figures |= dict.fromkeys(keys)
        if values[name]:
            quantiles = np.percentile(values[name], (50, 95, 99))
            figures |= {
                key: round(1000 * float(s), 2) for key, s in zip(keys, quantiles, strict=True)
            }
    return figures


def row(passes: list[BenchPass]) -> dict[str, Any]:
    """Figures of one arm at one concurrency over all rounds.

    `output_tok_s` is the median over rounds, beside its minimum and maximum. Times are over all
    answers, in milliseconds: to the first token, and per later token (the mean of each answer).
    `compiled_while_measured`: see `count_compilations`.
    """
    answers = [answer for each_pass in passes for answer in each_pass.all_answers]
    rates = [each_pass.tokens_per_second for each_pass in passes]
    length = sum((each_pass.speculation for each_pass in passes), VerifySteps()).acceptance_length
    return {
        "output_tok_s": round(float(np.median(rates)), 2),
        "output_tok_s_min": round(min(rates), 2),
        "output_tok_s_max": round(max(rates), 2),
        **percentiles(answers),
        "acceptance_length": None if length is None else round(length, 3),
        "answers": len(answers),
        "tokens": sum(each_pass.tokens for each_pass in passes),
        "compiled_while_measured": count_compilations(passes),
    }


def is_within_noise(a: Sequence[float], b: Sequence[float]) -> bool | None:
    """Return whether the difference of two arms is within noise, by their values over rounds.

    It is not if their medians are farther apart than the sum of their ranges (maximum - minimum).
    None if either has fewer than `LEAST_ROUNDS` values.
    """
    if min(len(a), len(b)) < LEAST_ROUNDS:
        return None
    return bool(abs(np.median(a) - np.median(b)) <= np.ptp(a) + np.ptp(b))


def rows(runs: Runs) -> list[dict[str, Any]]:
    """All rows of the report.

    `ratio`: median throughput divided by the first arm's, for the same data set and concurrency;
    None if there is one arm. `within_noise`: see `is_within_noise`; None for the first arm.
    """
    table = []
    for (dataset, concurrency), by_arm in runs.items():
        # Ratios are of the exact rates; rows hold rounded ones.
        rates = {
            arm: [each_pass.tokens_per_second for each_pass in passes_of_arm]
            for arm, passes_of_arm in by_arm.items()
        }
        first_arm, base = next(iter(rates.items()))
        for arm, passes in by_arm.items():
            ratio = round(float(np.median(rates[arm]) / np.median(base)), 3)
            table.append(
                {
                    "dataset": dataset,
                    "concurrency": concurrency,
                    "arm": arm,
                    "ratio": ratio if len(by_arm) > 1 else None,
                    "within_noise": None if arm == first_arm else is_within_noise(rates[arm], base),
                    **row(passes),
                }
            )
    return table


def dtypes(settings: BenchSettings, servers: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Return the dtypes of the arms: as their servers report, or else as --dtype says."""
    dtype_flag = NOT_KNOWN if settings.dtype == "auto" else settings.dtype
    reported = (server["dtype"] for server in servers.values())
    return {dtype_flag if dtype == NOT_KNOWN else dtype for dtype in reported}


def why_unequal(settings: BenchSettings, servers: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return why outputs of the arms may differ; None if they must be equal."""
    computed = dtypes(settings, servers)
    if NOT_KNOWN in computed:
        return "arms whose dtype is not known (--dtype names it)"
    if computed != {"float32"}:
        return f"near-ties of {' and '.join(sorted(computed))}"
    if {server.get(SEEDED, "on") for server in servers.values()} != {"on"}:
        return "samples of arms without --enable-deterministic-inference"
    if any(not server["device"].startswith(("CPU", NOT_KNOWN)) for server in servers.values()):
        # A GPU verifies a block with other kernels than it decodes a token with.
        return "near-ties of float32 on a GPU"
    return None


def summarize(
    settings: BenchSettings,
    prompts: dict[str, int],
    distinct: dict[str, int],
    measured: Measurements,
) -> dict[str, Any]:
    """The whole report as one object.

    Args:
        prompts: the number of prompts by data set.
        distinct: the number of different prompts by data set.
    """
    runs, simulated = measured.runs, settings.simulated_acceptance
    differing = None
    if simulated is None:
        differing = {arm: len(places) for arm, places in differences(runs).items()}
    in_turns = "all servers at once, arms taking turns"
    pair = settings.own_text_pair
    return {
        "width": _width(settings, measured),
        "outputs": _outputs(settings, measured, differing),
        "differing_answers": differing,
        "near_ties": {arm: tie.as_dict() for arm, tie in measured.near_ties.items()},
        "simulated_acceptance": simulated,
        "command": settings.command,
        "text": kinds()[pair] if pair else None,
        "servers": measured.servers,
        "asked_dtype": settings.dtype,
        "client": hardware(),
        "arms": list(next(iter(runs.values()))),
        "prompts": prompts,
        "distinct_prompts": distinct,
        "max_new_tokens": settings.max_new_tokens,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "sampling": sampling(settings),
        "thinking": settings.thinking,
        "order": in_turns if measured.at_once else "one server after another",
        "prefix_cache_kept": measured.kept_prefixes,
        "start_s": measured.start_s,
        "rows": rows(runs),
    }


def _width(settings: BenchSettings, measured: Measurements) -> str | None:
    """Return a note that the arm dflash does not have a server's default width; None if it has."""
    is_cpu = any(server["device"].startswith("CPU") for server in measured.servers.values())
    if not (is_cpu and settings.verifies_whole_blocks):
        return None
    return (
        f"the arm dflash verifies whole blocks ({WIDTH} fixed); a server on a CPU is adaptive by "
        f"default: `-- {WIDTH} auto` measures that"
    )


def _outputs(
    settings: BenchSettings, measured: Measurements, differing: dict[str, int] | None
) -> str:
    """Describe the comparison of outputs. `differing`: None if outputs were not compared."""
    if differing is None:
        return (
            f"acceptance is SIMULATED at {settings.simulated_acceptance:g} tokens per step: "
            "outputs are not the target's and were not compared"
        )
    if not differing:
        return "outputs: not compared: one arm"
    first_arm, *_ = next(iter(measured.runs.values()))
    count = sum(
        len(bench_pass.answers)
        for by_arm in measured.runs.values()
        for bench_pass in by_arm[first_arm]
    )
    why, how = why_unequal(settings, measured.servers), sampling(settings)
    if why is None:
        return f"outputs: the same in all arms ({count} answers each, {how}, float32)"
    counts = ", ".join(f"{arm} {different} of {count}" for arm, different in differing.items())
    ties = [f"; of {arm} the first: {tie}" for arm, tie in measured.near_ties.items()]
    return f"outputs may differ from {first_arm}'s by {why}, and did for: {counts}{''.join(ties)}"


def sampling(settings: BenchSettings) -> str:
    """Describe how tokens are chosen, for reading."""
    if not settings.temperature:
        return "greedy"
    how = [f"temperature {settings.temperature:g}"]
    how += [f"top-p {settings.top_p:g}"] if settings.top_p < 1 else []
    how += [f"top-k {settings.top_k}"] if settings.top_k else []
    return ", ".join([*how, f"seed {settings.seed}"])


def card(result: dict[str, Any]) -> list[str]:
    """Return the measurements, the machine and the settings, line by line."""
    sets = ", ".join(f"{count} of {name}" for name, count in result["prompts"].items())
    ratios = "ratios: of medians over rounds; ~ is within noise: the medians are no farther apart "
    ratios += "than the two ranges together"
    if result["rounds"] < LEAST_ROUNDS:
        ratios = f"ratios: too few rounds show no spread; --rounds {LEAST_ROUNDS} or more do"
    lines = [] if result["width"] is None else [result["width"]]
    lines += [result["outputs"], *_servers(result)]
    if result["text"] is not None:
        lines.append(f"text of the pair: {result['text']}")
    client = result["client"]
    lines += [
        f"client: {client['cores']} cores of {client['processor']}, {client['memory_gib']} GiB; "
        f"{client['date']}; Python {client['python']}",
        f"command: {result['command']}",
        f"prompts: {sets}; at most {result['max_new_tokens']} new tokens each; "
        f"{result['sampling']}; rounds: {result['rounds']}; {result['order']}",
    ]
    lines += [ratios] if len(result["arms"]) > 1 else []
    lines += _repeated(result) + _compiled(result)
    if result["prefix_cache_kept"]:
        arms = ", ".join(result["prefix_cache_kept"])
        lines.append(f"prefix cache: could not be emptied between passes on {arms}")
    return lines


def _repeated(result: dict[str, Any]) -> list[str]:
    """Return a line for each data set whose prompts were repeated within a pass."""
    return [
        f"repeated: {name} has {distinct} prompts, sent over and over; what is repeated comes from "
        "the servers' prefix caches, so TTFT and tok/s of all arms are better than with as many "
        "different prompts"
        for name, distinct in result["distinct_prompts"].items()
        if distinct < result["prompts"][name]
    ]


def _compiled(result: dict[str, Any]) -> list[str]:
    """Return a line for each row whose rounds waited for compilations."""
    return [
        f"compiled while measured: {row['arm']}, {row['dataset']}, {row['concurrency']} at a time: "
        f"{row['compiled_while_measured']} kernels; its tok/s are too low"
        for row in result["rows"]
        if row["compiled_while_measured"]
    ]


def _servers(result: dict[str, Any]) -> list[str]:
    """Return a line of labels for each arm's server, and one for the labels that all share."""
    servers, common = result["servers"], dict[str, str]()
    for name in next(iter(servers.values())):
        values = {server[name] for server in servers.values()}
        if len(values) == 1 and len(servers) > 1:
            common[name] = values.pop()
    every = {"all arms": common} if common else {}
    described = {
        **{
            arm: {k: v for k, v in server.items() if k not in common}
            for arm, server in servers.items()
        },
        **every,
    }
    dtype_flag, lines = result["asked_dtype"], []
    for who, facts in described.items():
        if facts.get("dtype") == NOT_KNOWN and dtype_flag != "auto":
            facts = {**facts, "dtype": f"{dtype_flag} (as asked for; the server does not tell)"}
        lines += [f"{who}: {'; '.join(f'{k} {v}' for k, v in facts.items())}"] if facts else []
    return lines


def times(row: dict[str, Any], name: str) -> str:
    """Median and percentiles of one of `TIMES`, for reading."""
    values = [row[key] for key in percentile_keys(name)]
    return "-" if None in values else "/".join(map(str, values))


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the table shows it: title -> text."""
    spread = f" ({row['output_tok_s_min']} to {row['output_tok_s_max']})"
    noise = "~" if row["within_noise"] else ""
    return {
        "data set": row["dataset"],
        "concurrency": row["concurrency"],
        "arm": row["arm"],
        "output tok/s (range)": f"{row['output_tok_s']}{spread}",
        "ratio": "-" if row["ratio"] is None else f"{noise}{row['ratio']}x",
        **{f"{title} p50/p95/p99": times(row, name) for name, title in TIMES.items()},
        "acceptance length": row["acceptance_length"] or "-",
    }


def markdown(result: dict[str, Any]) -> str:
    """Card and table."""
    shown_rows = [cells(row) for row in result["rows"]]
    titles = list(shown_rows[0])
    if result["simulated_acceptance"] is not None:
        titles[-1] = f"simulated {titles[-1]}"
    if result["temperature"]:
        titles[-1] += f" at temperature {result['temperature']:g}"
    lines = [f"- {line}" for line in card(result)]
    lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(map(str, shown_row.values()))} |" for shown_row in shown_rows]
    return "\n".join([*lines, ""])
