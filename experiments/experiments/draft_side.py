"""The draft side of a step on a CPU against another commit of this checkout, without servers.

Propose and absorb of the demo draft in float32, on one thread: two processes take turns, and both
must draft the same tokens. Times are of the processor, so that other work on the machine counts
little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.experiments.worker_overhead import ROOT, spread, tree_of
from experiments.runner import Arms, Experiment, Progress, option, take_turns
from sglang_dflash.facts.embedded import demo_pair

CHILD = ROOT / "experiments/draft_side.py"
# Requests, committed tokens of each, window (0 for none).
LOADS = ((1, 256, 0), (1, 2048, 0), (8, 512, 0), (8, 2048, 256))


@dataclass(frozen=True)
class Options:
    revision: str = option("HEAD", "the commit to compare with")
    rounds: int = option(9, "measured turns")
    steps: int = option(20, "steps of a turn")


class Turn(NamedTuple):
    """Milliseconds of the processor per step, and the tokens drafted last."""

    step_ms: float
    ids: list[list[int]]


class Child:
    """A process with the drafter of one tree under one load."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, steps: int) -> Turn:
        """Raises RuntimeError: the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process has no pipes")
        stdin.write(f"{steps}\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self._process.wait()}")
        found = json.loads(line)
        return Turn(1000 * found["seconds"] / steps, found["ids"])


@contextmanager
def child(tree: Path, load: tuple[int, int, int]) -> Iterator[Child]:
    """A process with our packages of `tree`."""
    command = [sys.executable, str(CHILD), str(demo_pair("dense").draft), *map(str, load)]
    env = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'kernels'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=tree
    ) as process:
        try:
            yield Child(process)
        finally:
            process.terminate()


def workload(_: Arms, options: Options, progress: Progress) -> dict[str, dict[str, list[Turn]]]:
    """By load and tree. Raises ConfigError: git does not know the commit; RuntimeError: the two
    draft other tokens."""
    trees = {"ours": ROOT, "revision": tree_of(options.revision)}
    found = {}
    for requests, context, window in LOADS:
        name = f"{requests}x{context}" + (f"w{window}" if window else "")
        with ExitStack() as stack:
            children = {
                tree: stack.enter_context(child(path, (requests, context, window)))
                for tree, path in trees.items()
            }

            def turn(tree: str, _: int, children: dict[str, Child] = children) -> Turn:
                return children[tree].run(options.steps)

            take_turns(
                trees, 1, turn, lambda step, *of, name=name: progress(f"{name}, {step}", *of)
            )
            turns = take_turns(
                trees, options.rounds, turn,
                lambda step, *of, name=name: progress(f"{name}, {step}", *of),
            )  # fmt: skip
        if turns["ours"][-1].ids != turns["revision"][-1].ids:
            raise RuntimeError(f"{name}: the two draft other tokens: no figure without that")
        found[name] = turns
    return found


def report(found: dict[str, dict[str, list[Turn]]], _: Options) -> dict[str, Any]:
    rows = {}
    for name, turns in found.items():
        ratios = [
            ours.step_ms / theirs.step_ms
            for ours, theirs in zip(turns["ours"], turns["revision"], strict=True)
        ]
        times = {
            f"{tree}_ms": round(statistics.median(turn.step_ms for turn in many), 3)
            for tree, many in turns.items()
        }
        rows[name] = {**times, **spread("ratio", ratios)}
    return {"loads": rows}


def table(result: dict[str, Any]) -> Iterator[str]:
    for name, row in result["loads"].items():
        yield f"{name:12}" + "".join(f"  {key} {value}" for key, value in row.items())


EXPERIMENT = Experiment(
    name="draft_side",
    description=__doc__,
    options=Options,
    workload=workload,
    report=report,
    table=table,
)
