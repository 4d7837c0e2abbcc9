"""The verdict, accept or reject, from the figures of all parts (docs/gpu.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The most `graph_over_floor` of a whole step.
STEP_GOAL = 1.3
# The most that a step's time may grow with the context if there is a window.
WINDOW_GOAL = 1.05
# The most `graph_over_floor` of kernels that read all logits once.
READING_GOAL = 1.15

Parts = Mapping[str, Mapping[str, Any]]


def find_failures(parts: Parts) -> list[str]:
    """Return the reasons against serving on this GPU: parts that failed, or in which the host
    waits for the device."""
    problems = [f"{name}: {part['failed']}" for name, part in parts.items() if "failed" in part]
    for name, part in parts.items():
        if part.get("host_waits"):
            problems.append(f"{name}: the host waits for the GPU ({part['host_waits']})")
        attention = part.get("attention")
        if isinstance(attention, Mapping) and not attention["triton"].startswith("as torch"):
            problems.append(f"{name}: attention triton: {attention['triton']}")
    return list(dict.fromkeys(problems))


def find_missed_goals(parts: Parts) -> list[str]:
    """Return missed speed goals, which are worth a report but no reason against serving."""
    return [*_steps(parts), *_windows(parts), *_readers(parts)]


def _steps(parts: Parts) -> Iterator[str]:
    for name, part in parts.items():
        over = part.get("step", {}).get("graph_over_floor")
        if "/1x" in name and over is not None and over > STEP_GOAL:
            yield f"{name}: a step takes {over} of its floor; the goal is {STEP_GOAL}"


def _windows(parts: Parts) -> Iterator[str]:
    for name in parts:
        short = name.replace("1x131072w4096", "1x4096w4096")
        times = [parts.get(part, {}).get("step", {}).get("graph_ms") for part in (name, short)]
        if name != short and None not in times and times[0] > WINDOW_GOAL * times[1]:
            ratio = times[0] / times[1]
            yield f"{name}: {ratio:.2f} of the time of {short}; the goal is {WINDOW_GOAL}"


def _readers(parts: Parts) -> Iterator[str]:
    for name, part in parts.items():
        for kernel in ("largest", "candidates") if name.startswith("kernels/") else ():
            over = part.get(kernel, {}).get("graph_over_floor")
            # With few requests, the launch takes most of the time.
            if over is not None and over > READING_GOAL and name.endswith("/256"):
                yield f"{name}: {kernel} takes {over} of its floor; the goal is {READING_GOAL}"
