"""Our worker against SGLang's built-in one, replay against snapshots, itself, or another revision.

Same platform, same pair, same prompts, greedy. Both servers run at once in turns; the server that
waits sleeps. The two must give the same outputs, or nothing is reported. `--against itself` shows
how far the ratios of two equal servers are from 1. `--against revision --revision REV` compares
with our worker of that commit of this checkout.

`draft_ms` is the host's time in propose and commit per decode step of a batch, from /server_info:
on a CPU, the draft side of the step. The built-in worker has no such figure.
"""

from __future__ import annotations

import statistics
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments import measure
from experiments.runner import Arms, Experiment, Progress, all_at_once, option, take_turns
from sglang_dflash.bench.server import FlagValue, ServerConfig, demo_config
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

NEW_TOKENS = 96
LEVELS = (1, 8)
AGAINST: dict[str, dict[str, FlagValue]] = {
    "builtin": {"--speculative-dflash-worker": "builtin"},
    "snapshot": {"--speculative-dflash-recurrent-rollback": "snapshot"},
    "itself": {},
    "revision": {},
}
ROOT = Path(__file__).parents[1]


class Pass(NamedTuple):
    """One pass over the prompts, and milliseconds of the draft side per decode step; None if the
    worker does not tell."""

    run: measure.Run
    draft_ms: float | None


# Arm -> one pass per round.
Runs = dict[str, list[Pass]]


@dataclass(frozen=True)
class Options:
    model: str = option("dense", "which embedded pair")
    against: str = option("builtin", "what ours is compared with", choices=AGAINST)
    rounds: int = option(5, "measured passes per arm and concurrency")
    revision: str = option("", "with --against revision: a commit of this checkout")


def arms(options: Options) -> Arms:
    """Raises ConfigError: git does not know the revision."""
    ours = demo_config(demo_pair(options.model), dflash=True)
    if options.against == "revision":
        return {"ours": ours, "revision": of_revision(ours, options.revision)}
    return {"ours": ours, options.against: ours.with_flags(AGAINST[options.against])}


def of_revision(config: ServerConfig, revision: str) -> ServerConfig:
    """The same server with our packages as they were at a commit."""
    tree = tree_of(revision)
    return replace(config, env={**config.env, "PYTHONPATH": f"{tree}:{tree / 'kernels'}"})


def tree_of(revision: str) -> Path:
    """A folder with our packages as they were at a commit. Raises ConfigError: git does not know
    it."""
    folder = Path(tempfile.gettempdir()) / f"sglang-dflash-{_commit(revision)}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
            archive = Path(beside) / "packages.tar"
            _git("archive", "-o", str(archive), revision, "sglang_dflash", "kernels")
            tree = Path(beside) / "tree"
            with tarfile.open(archive) as packed:
                packed.extractall(tree, filter="data")
            # Whole or not at all.
            tree.rename(folder)
    return folder


def _commit(revision: str) -> str:
    if not revision:
        raise ConfigError("--revision", "", "--against revision needs a commit of this checkout")
    return _git("rev-parse", "--verify", f"{revision}^{{commit}}").strip()


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError("--revision", required=f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def workload(arms: Arms, options: Options, progress: Progress) -> dict[int, Runs]:
    """By concurrency. Raises RuntimeError if the two servers' outputs differ."""
    prompts = demo_pair(options.model).prompts
    with all_at_once(arms) as servers:
        return {n: run_level(servers, prompts, n, options.rounds, progress) for n in LEVELS}


def run_level(
    servers: dict[str, Server],
    prompts: list[str],
    concurrency: int,
    rounds: int,
    progress: Progress,
) -> Runs:
    prompts = prompts[: max(4, 2 * concurrency)]

    def one_pass(name: str, _: int) -> Pass:
        before = draft_side(servers[name])
        run = measure.run(servers[name], prompts, concurrency, NEW_TOKENS)
        after = draft_side(servers[name])
        if before is None or after is None:
            return Pass(run, None)
        return Pass(run, 1000 * (after[1] - before[1]) / (after[0] - before[0]))

    def at_a_time(step: str, done: int, of: int) -> None:
        progress(f"{concurrency} at a time, {step}", done, of)

    take_turns(servers, 1, one_pass, lambda step, *of: at_a_time(f"warm-up, {step}", *of))
    runs = take_turns(servers, rounds, one_pass, at_a_time)
    if any(a.run.outputs != b.run.outputs for a, b in zip(*runs.values(), strict=True)):
        raise RuntimeError("the two servers' outputs differ: no figure without exactness")
    return runs


def draft_side(server: Server) -> tuple[int, float] | None:
    """Decode steps so far, and seconds of the host in propose and commit."""
    shown = server.dflash()
    if "host_seconds" not in shown:
        return None
    seconds = shown["host_seconds"]
    return shown["decode_steps"], seconds.get("propose", 0.0) + seconds.get("commit", 0.0)


def report(runs: dict[int, Runs], _: Options) -> dict[str, Any]:
    rows = {f"concurrency_{level}": compare(by_arm) for level, by_arm in runs.items()}
    return {"new_tokens": NEW_TOKENS, **rows}


def compare(runs: Runs) -> dict[str, Any]:
    """Medians per arm; medians, least and greatest of the round-by-round ratios (ours / other)."""
    pairs = list(zip(*runs.values(), strict=True))
    both = [(a.run, b.run) for a, b in pairs]
    draft = [a.draft_ms / b.draft_ms for a, b in pairs if a.draft_ms and b.draft_ms]
    return {
        **{name: figures(many) for name, many in runs.items()},
        **spread("step_time_ratio", [a.step_ms / b.step_ms for a, b in both]),
        **spread("throughput_ratio", [a.tokens_per_second / b.tokens_per_second for a, b in both]),
        **(spread("draft_time_ratio", draft) if draft else {}),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    of = {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {key: round(value, 4) for key, value in of.items()}


def figures(passes: list[Pass]) -> dict[str, float]:
    runs, draft = [one.run for one in passes], [one.draft_ms for one in passes if one.draft_ms]
    counts = sum((r.counts for r in runs), VerifySteps())
    return {
        "step_ms": round(statistics.median(r.step_ms for r in runs), 3),
        "tokens_per_second": round(statistics.median(r.tokens_per_second for r in runs), 2),
        "acceptance_length": round(counts.acceptance_length or 1.0, 3),
        **({"draft_ms": round(statistics.median(draft), 3)} if draft else {}),
    }


EXPERIMENT = Experiment(
    name="worker_overhead",
    description=__doc__,
    options=Options,
    arms=arms,
    workload=workload,
    report=report,
)
