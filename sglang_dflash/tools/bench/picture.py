"""The picture of a comparison: throughput by concurrency, a bar per arm, a panel per data set."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

from sglang_dflash.common.errors import ConfigError


def check() -> None:
    """Raise ConfigError if no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        required = "needs matplotlib, which is not installed; install sglang-dflash[bench]"
        raise ConfigError("picture", required=required)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the rows of a report as a PNG.

    The number on a bar is its ratio to the first arm, with ~ if that is within noise; the line on
    it is the range over rounds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    datasets = list(result["prompts"])
    size = (max(6.5, 4.8 * len(datasets)), 4.7)
    figure, axes = plt.subplots(1, len(datasets), figsize=size, layout="constrained", squeeze=False)
    for axis, dataset in zip(axes.flat, datasets, strict=True):
        _panel(axis, [row for row in result["rows"] if row["dataset"] == dataset], result["arms"])
        axis.set_title(dataset, fontsize=10)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    # About 13 letters of that size fit an inch.
    figure.suptitle(
        "\n".join(textwrap.fill(line, int(13 * size[0])) for line in title(result)), size=9
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def title(result: dict[str, Any]) -> list[str]:
    """The title, line by line. A simulated acceptance comes first, as in the report."""
    models, devices, dtypes = (
        " and ".join(dict.fromkeys(server[label] for server in result["servers"].values()))
        for label in ("model", "device", "dtype")
    )
    simulated = [] if result["simulated_acceptance"] is None else [result["outputs"]]
    return [
        *simulated,
        f"Output throughput: {models}; device {devices}; dtype {dtypes}; "
        f"{result['client']['date']}; on the bars: ratio to {result['arms'][0]} (~: within noise) "
        "and range over rounds",
    ]


def _panel(axis: Any, rows: list[dict[str, Any]], arms: list[str]) -> None:
    levels = sorted({row["concurrency"] for row in rows})
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        by_level = {row["concurrency"]: row for row in rows if row["arm"] == arm}
        arm_rows = [by_level[level] for level in levels]
        places = [n + (i - (len(arms) - 1) / 2) * width for n in range(len(levels))]
        rates = [row["output_tok_s"] for row in arm_rows]
        ranges = [
            [row["output_tok_s"] - row["output_tok_s_min"] for row in arm_rows],
            [row["output_tok_s_max"] - row["output_tok_s"] for row in arm_rows],
        ]
        bars = axis.bar(
            places, rates, width * 0.92, label=arm, yerr=ranges, error_kw={"elinewidth": 0.8}
        )
        if len(arms) > 1:
            labels = [
                f"{'~' if row['within_noise'] else ''}{row['ratio']:.2f}x" for row in arm_rows
            ]
            axis.bar_label(bars, labels, fontsize=7, padding=2)
    axis.set_xticks(range(len(levels)), [str(level) for level in levels])
    axis.set(xlabel="concurrency (requests at a time)", ylabel="output tokens per second")
    axis.margins(y=0.12)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
