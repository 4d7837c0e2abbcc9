"""Step costs fitted on two published tasks predict the better block size of the others.

Computed from the figures of the model cards; nothing runs. A step's cost at a concurrency is
requests x acceptance length / throughput, prefill included, as the geometric mean over Math500 and
GSM8K. On each other task the cost and the task's own acceptance lengths predict the throughput of
block sizes 8 and 16, and the better of the two. `adaptive` is the most that one width per row can
reach among 1, 4, 8 and 16: tokens of width 4 by a geometric acceptance that is fitted to both
lengths, its cost by a straight line between widths 1 and 8.

Source: the model cards of z-lab/Qwen3.5-27B-DFlash and z-lab/Qwen3.6-35B-A3B-DFlash (one B200,
SGLang, thinking on, at most 4,096 output tokens).
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from experiments.runner import Arms, Experiment, NoOptions, Progress

CONCURRENCY = (1, 8, 16, 32)
FITTED = ("Math500", "GSM8K")
NARROW = 4


class Task(NamedTuple):
    """A published task: output tokens per second by concurrency, and acceptance lengths."""

    plain: tuple[int, ...]
    b8: tuple[int, ...]
    b16: tuple[int, ...]
    accept_8: float
    accept_16: float


PUBLISHED: dict[str, dict[str, Task]] = {
    "Qwen3.5-27B": {
        "Math500": Task(
            (84, 625, 1121, 1949), (335, 2020, 3646, 4288), (397, 2270, 3135, 3712), 5.90, 7.93
        ),
        "GSM8K": Task(
            (83, 625, 1109, 1914), (301, 1814, 2896, 3822), (330, 1868, 2589, 3152), 5.57, 7.22
        ),
        "HumanEval": Task(
            (83, 602, 1031, 1720), (350, 1856, 2749, 3412), (427, 2079, 2748, 3198), 6.34, 9.18
        ),
        "MBPP": Task(
            (84, 627, 1075, 1832), (311, 1757, 2661, 3309), (347, 1826, 2479, 2808), 5.60, 7.27
        ),
        "MT-Bench": Task(
            (84, 622, 1113, 1900), (250, 1495, 2403, 3256), (255, 1444, 1984, 2391), 4.54, 5.47
        ),
    },
    "Qwen3.6-35B-A3B": {
        "Math500": Task(
            (234, 1266, 1954, 2755), (617, 2839, 4465, 6614), (682, 3138, 4813, 6520), 5.56, 7.35
        ),
        "GSM8K": Task(
            (235, 1236, 1886, 2699), (540, 2466, 3899, 5713), (556, 2564, 3821, 5239), 5.21, 6.73
        ),
        "HumanEval": Task(
            (238, 1255, 1944, 2767), (561, 2655, 4135, 6059), (603, 2800, 4208, 5782), 5.09, 6.44
        ),
        "MBPP": Task(
            (235, 1224, 1948, 2780), (497, 2324, 3636, 4884), (559, 2538, 3816, 5378), 4.78, 5.83
        ),
        "MT-Bench": Task(
            (233, 1238, 1885, 2633), (438, 2060, 3182, 4720), (442, 2028, 2997, 4034), 4.20, 5.14
        ),
        "Alpaca": Task(
            (235, 1221, 1844, 2579), (407, 1880, 2903, 4115), (393, 1782, 2567, 3689), 3.94, 4.62
        ),
    },
}


def step_costs(tasks: dict[str, Task], at: int) -> dict[int, float]:
    """Seconds of a step by width, at the concurrency `CONCURRENCY[at]`."""
    running = CONCURRENCY[at]
    by_width: dict[int, list[float]] = {1: [], 8: [], 16: []}
    for name in FITTED:
        task = tasks[name]
        for width, tokens, speeds in (
            (1, 1.0, task.plain), (8, task.accept_8, task.b8), (16, task.accept_16, task.b16),
        ):  # fmt: skip
            by_width[width].append(running * tokens / speeds[at])
    costs = {width: statistics.geometric_mean(found) for width, found in by_width.items()}
    costs[NARROW] = costs[1] + (costs[8] - costs[1]) * (NARROW - 1) / 7
    return costs


def geometric_tokens(rate: float, width: int) -> float:
    """Tokens per step if each draft is accepted with the same probability, below 1."""
    return (1 - rate**width) / (1 - rate)


def acceptance_rate(task: Task) -> float:
    """The probability whose tokens per step are nearest to both published lengths, relatively."""

    def miss(rate: float) -> float:
        pairs = ((8, task.accept_8), (16, task.accept_16))
        return sum(math.log(geometric_tokens(rate, width) / tokens) ** 2 for width, tokens in pairs)

    return min((i / 10_000 for i in range(1, 10_000)), key=miss)


def predict(tasks: dict[str, Task], name: str, at: int) -> dict[str, Any]:
    task, costs, running = tasks[name], step_costs(tasks, at), CONCURRENCY[at]
    tokens = {
        1: 1.0, NARROW: geometric_tokens(acceptance_rate(task), NARROW),
        8: task.accept_8, 16: task.accept_16,
    }  # fmt: skip
    speeds = {width: running * tokens[width] / costs[width] for width in tokens}
    width = max(speeds, key=lambda one: speeds[one])
    chosen, better = 8 if speeds[8] > speeds[16] else 16, 8 if task.b8[at] > task.b16[at] else 16
    return {
        "task": name,
        "concurrency": running,
        "predicted": {str(one): round(speeds[one]) for one in sorted(speeds)},
        "published": {"1": task.plain[at], "8": task.b8[at], "16": task.b16[at]},
        "chosen": chosen,
        "better": better,
        "hit": chosen == better,
        "lost_by_the_choice": round(
            1 - (task.b8 if chosen == 8 else task.b16)[at] / max(task.b8[at], task.b16[at]), 4
        ),
        "adaptive_width": width,
        "adaptive": round(speeds[width]),
    }


def workload(_arms: Arms, _options: NoOptions, _progress: Progress) -> list[dict[str, Any]]:
    return [
        {"target": target, **predict(tasks, name, at)}
        for target, tasks in PUBLISHED.items()
        for name in tasks
        if name not in FITTED
        for at in range(len(CONCURRENCY))
    ]


def report(rows: list[dict[str, Any]], _: NoOptions) -> dict[str, Any]:
    errors = [
        abs(row["predicted"][width] / row["published"][width] - 1)
        for row in rows
        for width in ("8", "16")
    ]
    return {
        "fitted_on": list(FITTED),
        "rows": rows,
        "hits": sum(row["hit"] for row in rows),
        "of": len(rows),
        "most_lost_by_a_miss": max(row["lost_by_the_choice"] for row in rows),
        "median_error_of_throughput": round(statistics.median(errors), 4),
        "most_error_of_throughput": round(max(errors), 4),
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{'target':17}{'task':11}{'c':>3}{'better':>8}{'chosen':>8}{'adaptive':>10}{'tok/s':>8}"
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['target']:17}{row['task']:11}{row['concurrency']:3}{row['better']:8}"
            f"{row['chosen']:8}{row['adaptive_width']:10}{row['adaptive']:8}"
        )
    return [*lines, f"{result['hits']} of {result['of']} right"]


EXPERIMENT = Experiment(
    name="width_published",
    description=__doc__,
    workload=workload,
    report=report,
    table=table,
)
