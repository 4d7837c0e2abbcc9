"""Write the figures in README and docs from experiments/results: `python tools/figures.py`.

A table stands between `<!-- figures NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(name: str) -> dict[str, Any]:
    """The result file `experiments/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[object], *rows: Sequence[object]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def printed(command: str) -> str:
    """What prints these figures. A reader's run leaves the result files as they are."""
    return re.sub(r" --picture| --out \S+", "", command)


def summary() -> str:
    """The README's rows: one figure each, with its command."""
    names = ("demo_code_cpu", "demo_cpu", "demo_hybrid_cpu", "bench_dense_cpu/results")
    code, dense, hybrid, bench = map(read, names)
    overhead, kv = read("worker_overhead_cpu"), read("target_kv_tokens_cpu")["share_of_plain"]
    rows = [
        (
            f"{name}: output tokens/s against plain decoding",
            f"{result['speedup']}x at acceptance length {result['acceptance_length']}",
            f"`{result['command']}`",
        )
        for name, result in (
            ("code demo pair, text that neither model has seen", code),
            ("dense demo pair, memorized text", dense),
            ("hybrid demo pair, memorized text", hybrid),
        )
    ]
    unseen = [r for r in bench["rows"] if (r["dataset"], r["arm"]) == ("stdlib", "dflash")]
    ratios = ", ".join(f"{row['ratio']}x" for row in unseen)
    at = ", ".join(str(row["concurrency"]) for row in unseen)
    rows.append(
        (
            f"the same dense pair, text that it has never seen, concurrency {at}",
            f"{ratios} at acceptance length {unseen[0]['acceptance_length']}",
            f"`{printed(bench['command'])}`",
        )
    )
    steps = [with_range(overhead[f"concurrency_{n}"], "step_time_ratio", 2) for n in (1, 8)]
    equal = [read("worker_overhead_itself_cpu")[f"concurrency_{n}"] for n in (1, 8)]
    least, most = (f([at[f"step_time_ratio_{f.__name__}"] for at in equal]) for f in (min, max))
    rows.append(
        (
            "step time, divided by the built-in worker's, concurrency 1 and 8",
            f"{steps[0]} and {steps[1]}; two equal servers: {least:.2f} to {most:.2f}",
            f"`{overhead['command']}`",
        )
    )
    rows.append(
        (
            "target KV tokens with a window of 512, as a share of those without a draft",
            f"{share(kv['bounded'])}; built-in worker {share(kv['builtin'])}",
            "`python -m experiments target_kv_tokens`",
        )
    )
    return table(("what", "result", "command"), *rows)


def demo(name: str) -> str:
    result = read(name)
    outputs = "identical" if result["identical"] else "different"
    prompts = result["speedup_by_prompt"]
    return table(
        (f"`{result['command']}` (12 prompts, concurrency 1)", "plain decoding", "DFLASH"),
        ("output tokens/s", result["ar_tok_s"], f"{result['dflash_tok_s']} ({result['speedup']}x)"),
        (
            "speedup of single prompts, median (range)",
            "",
            f"{prompts['median']}x ({prompts['min']}x to {prompts['max']}x)",
        ),
        ("tokens per verify step", 1, result["acceptance_length"]),
        ("ms per target forward, prefill included", result["ar_step_ms"], result["dflash_step_ms"]),
        ("outputs", "", outputs),
    )


def with_range(result: dict[str, Any], key: str, digits: int = 4) -> str:
    """A median and the range of the rounds."""
    median, least, most = (round(result[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{median} ({least} to {most})"


def itself() -> str:
    """The step-time ratios of two equal servers."""
    result = read("worker_overhead_itself_cpu")
    levels = {n: result[f"concurrency_{n}"] for n in (1, 8)}
    return table(
        ("", *(f"concurrency {n}" for n in levels)),
        (
            f"`{result['command']}`: step time of a server over that of an equal one",
            *(with_range(at, "step_time_ratio") for at in levels.values()),
        ),
    )


def overhead(name: str, other: str, ours: str) -> str:
    """Step times of two ways to serve, from `worker_overhead`."""
    result = read(name)
    key = next(k for k in result["concurrency_1"] if k in ("builtin", "snapshot"))
    rows = []
    for n in (1, 8):
        at = result[f"concurrency_{n}"]
        step = [f"{at[arm]['step_ms']} ms" for arm in (key, "ours")]
        rows.append((f"step time, concurrency {n}", *step, with_range(at, "step_time_ratio")))
    for n in (1, 8):
        at = result[f"concurrency_{n}"]
        rate = [at[arm]["tokens_per_second"] for arm in (key, "ours")]
        ratio = with_range(at, "throughput_ratio")
        rows.append((f"output tokens/s, concurrency {n}", *rate, ratio))
    return table(
        (f"`{result['command']}`", other, ours, f"{ours} / {other.removesuffix(' worker')}"), *rows
    )


def bench_dense() -> str:
    result = read("bench_dense_cpu/results")
    levels = sorted({row["concurrency"] for row in result["rows"]})
    lines = []
    for dataset in result["prompts"]:
        for arm in result["arms"]:
            rows = [r for r in result["rows"] if (r["dataset"], r["arm"]) == (dataset, arm)]
            cells = [
                f"{row['output_tok_s']:.0f} ({row['output_tok_s_min']:.0f} to "
                f"{row['output_tok_s_max']:.0f}), {row['ratio']}x"
                f"{' within noise' if row['within_noise'] else ''}"
                for row in rows
            ]
            lines.append((f"{dataset}, {arm}", *cells, rows[0]["acceptance_length"] or "-"))
    command = printed(result["command"])
    head = [f"`{command}`", *(f"{n} at a time" for n in levels), "acceptance length"]
    return table(head, *lines)


def multi_turn() -> str:
    result = read("multi_turn_cpu")
    arms = [result["arms"][name] for name in ("unbounded", "default", "tenth")]
    same = ["plain decoding's" if arm["chats"]["identical"] else "different" for arm in arms]
    return table(
        (
            f"`{result['command']}`: 20 chats of 6 turns, window {result['window']}, "
            f"{result['max_running_requests']} requests",
            "one entry per target slot",
            "default size",
            "a tenth of it",
        ),
        ("draft KV entries", *(arm["draft_kv_entries"] for arm in arms)),
        ("acceptance length", *(arm["chats"]["acceptance_length"] for arm in arms)),
        ("outputs", *same),
        ("prompt tokens found cached", *(arm["chats"]["cached_tokens"] for arm in arms)),
    )


def target_kv() -> str:
    result = read("target_kv_tokens_cpu")
    names = ("plain", "bounded", "per_target_token", "builtin")
    cells = [
        f"{result['target_kv_tokens'][n]} ({share(result['share_of_plain'][n])})" for n in names
    ]
    return table(
        (
            f"`{result['command']}`: window {result['window']}, "
            f"{result['max_running_requests']} requests, the same memory",
            "no draft",
            "ours",
            "ours without a window",
            "built-in with the window",
        ),
        ("target KV tokens", *cells),
    )


def headroom() -> str:
    result = read("draft_kv_headroom")
    first = result["sizes"].index(1.0)
    sizes = [f"**{size}** (default)" if size == 2.0 else size for size in result["sizes"][first:]]
    rows = [
        (name.replace(", ring", ": overwriting the oldest first"), *map(share, found[first:]))
        for name, found in result["found_share"].items()
    ]
    title = f"`{result['command']}`: share of what running requests may see that the cache holds"
    return table((title, *sizes), *rows)


def long_context() -> str:
    result = read("long_context_cpu")
    step, prefill = result["draft_side_step"], result["prefill"]
    return table(
        (f"`{result['command']}`, window {result['window']}", "", "", "ratio"),
        (
            f"draft side of a step (propose and commit), {result['short']} and {result['long']} "
            "tokens of context",
            f"{step['short_ms']} ms",
            f"{step['long_ms']} ms",
            step["ratio"],
        ),
        (
            f"prefill of {result['long']} tokens, plain decoding and DFLASH",
            f"{prefill['plain_s']} s",
            f"{prefill['dflash_s']} s",
            prefill["ratio"],
        ),
    )


def admission() -> str:
    result = read("admission_cpu")
    return table(
        (
            f"`{result['command']}`, {result['max_running_requests']} slots",
            "waiting",
            "not",
            "ratio",
        ),
        *(
            (title, result["wait"][key], result["off"][key], result[ratio])
            for title, key, ratio in (
                ("median time to first token, s", "first_token_s_median", "first_token_ratio"),
                ("output tokens/s", "tokens_per_second", "throughput_ratio"),
            )
        ),
    )


def recurrent_memory() -> str:
    result = read("recurrent_memory_cpu")
    given, most = result["states_given"], result["most_requests"]
    arms = ("plain", "replay", "snapshot")
    scratch = [given[arm]["scratch_bytes_per_request"] or "" for arm in arms]
    requests, states = given["plain"]["running_requests"], given["plain"]["recurrent_states"]
    return table(
        (
            f"`{result['command']}`: hybrid demo pair, {result['block_size']} tokens verified per "
            "step, the same memory",
            "plain decoding",
            "replay",
            "snapshots",
        ),
        ("bytes that verification keeps per request", *scratch),
        (
            f"target KV tokens, {requests} requests and {states} states",
            *(given[arm]["target_kv_tokens"] for arm in arms),
        ),
        ("most running requests", *(most[arm]["running_requests"] for arm in arms)),
    )


def width_published() -> str:
    result = read("width_published")
    rows = [row for row in result["rows"] if row["concurrency"] in (1, 32)]
    head = ("target, task, requests at a time", "published 8, 16", "predicted", "adaptive: width")
    table_of_rows = table(
        head,
        *(
            (
                f"{row['target']}, {row['task']}, {row['concurrency']}",
                f"{row['published']['8']}, {row['published']['16']}",
                f"{row['predicted']['8']}, {row['predicted']['16']}",
                f"{row['adaptive']}: {row['adaptive_width']}",
            )
            for row in rows
        ),
    )
    return (
        f"The better of 8 and 16 is predicted in {result['hits']} of {result['of']} rows; a miss "
        f"costs {share(result['most_lost_by_a_miss'])} at most. The median error of a throughput "
        f"is {share(result['median_error_of_throughput'])}, the largest "
        f"{share(result['most_error_of_throughput'])}.\n\n{table_of_rows}"
    )


def width() -> str:
    files = [f"width_{pair}_cpu" for pair in ("dense", "code", "hybrid")]

    def cell(value: dict[str, float]) -> str:
        return f"{value['ratio']:.2f} ({value['lower']:.2f})"

    rows = []
    for one in (point for name in files for point in read(name)["points"]):
        over, steps = one["over_plain"], one["width_steps"]
        drafted = 1 - steps.get("1", 0) / sum(steps.values())
        rows.append(
            (
                f"{one['pair']}, `{one['dataset']}`, {one['concurrency']}",
                f"{one['plain_step_ms']:.1f}",
                *(
                    cell(ratio)
                    for ratio in (one["noise"], over["width 1"], over["fixed 8"], over["fixed 4"])
                ),
                f"**{cell(over['adaptive'])}**",
                cell(one["over_best_fixed"]),
                f"{100 * drafted:.0f} %",
                f"{100 * one['deciding_share']:.1f} %",
            )
        )
    head = (
        "pair, data set, requests at a time|plain step, ms|plain again|width 1|width 8|width 4|"
        "adaptive|adaptive over the better of 4 and 8|steps that draft|deciding"
    )
    return table(head.split("|"), *rows)


def width_confidence() -> str:
    rows = []
    names = ("outcomes", "confidence", "confidence before")
    arms = ("confidence", "foresight", "confidence, ragged")
    for one in read("width_confidence_cpu")["points"]:
        told = one["predictions"]
        rows.append(
            (
                f"{one['pair']}, `{one['dataset']}`, {one['concurrency']}",
                *(f"{told[n]['log_loss']:.2f} ({told[n]['correlation']:.2f})" for n in names),
                *(f"{one['speed_over_outcomes'][n]:.2f}" for n in arms),
            )
        )
    head = (
        "pair, data set, requests at a time|outcomes|and confidence|"
        "and confidence of the step before|tokens/s: chosen with confidence|"
        "with foresight|with confidence, each request its own"
    )
    return table(head.split("|"), *rows)


def hardware(files: str = "*") -> str:
    """One sentence on the machine and the dates of result files."""
    paths = sorted(RESULTS.rglob(f"{files}.json"))
    found = [json.loads(path.read_text())["hardware"] for path in paths]
    machines = sorted({f"{h['cores']} cores of an {h['processor']}" for h in found})
    dates = sorted({h["date"] for h in found})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    which = " (each result file names its own)" if len(machines) > 1 else ""
    return f"Measured on {' or on '.join(machines)}{which}, no accelerator, {span}."


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "hardware": hardware,
    "width_hardware": lambda: hardware("width_*_cpu"),
    "demo_code": lambda: demo("demo_code_cpu"),
    "demo": lambda: demo("demo_cpu"),
    "demo_hybrid": lambda: demo("demo_hybrid_cpu"),
    "worker_overhead": lambda: overhead("worker_overhead_cpu", "built-in worker", "ours"),
    "replay_overhead": lambda: overhead("worker_overhead_hybrid_cpu", "snapshots", "replay"),
    "itself": itself,
    "bench_dense": bench_dense,
    "multi_turn": multi_turn,
    "target_kv": target_kv,
    "headroom": headroom,
    "long_context": long_context,
    "admission": admission,
    "recurrent_memory": recurrent_memory,
    "width": width,
    "width_published": width_published,
    "width_confidence": width_confidence,
}


def page(text: str) -> str:
    """`text` with every marked table written anew. Raises KeyError for an unknown name."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- figures {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- figures (\w+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def main() -> None:
    for path in PAGES:
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
