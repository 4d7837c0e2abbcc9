"""Our worker against SGLang's built-in one, replay against snapshots, itself, or another revision.

Same platform, same pair, same prompts, greedy or with a seed per prompt. Both servers run at once
in turns; the server that waits sleeps. The two must give the same outputs, or nothing is reported.
`--against itself` shows how far the ratios of two equal servers are from 1. `--against revision
--revision REV` compares with our worker of that commit of this checkout.

`draft_ms` is the host's time in propose and commit per decode step of a batch, from /server_info:
on a CPU, the draft side of the step. The built-in worker has no such figure.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.runner import all_at_once, exact_turns
from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench import load
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.bench.load import BenchPass
from sglang_dflash.tools.bench.server import FlagValue, Server, demo_config
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

NEW_TOKENS = 96
LEVELS = (1, 8)
AGAINST: dict[str, dict[str, FlagValue]] = {
    "builtin": {"--speculative-dflash-worker": "builtin"},
    "snapshot": {"--speculative-dflash-recurrent-rollback": "snapshot"},
    "itself": {},
    "revision": {},
}
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Turn(BenchPass):
    """`draft_ms`: milliseconds of the draft side per decode step, None if the worker does not
    tell."""

    concurrency: int
    draft_ms: float | None

    @property
    def step_ms(self) -> float:
        """Mean time between a request's verify steps, prefill included, in milliseconds."""
        return 1000 * self.seconds * self.concurrency / self.speculation.steps


# Arm -> one turn per round.
Turns = dict[str, list[Turn]]


@dataclass(frozen=True)
class Options:
    model: str = setting(
        "dense", "which memorized pair (default: {default})", choices=("dense", "hybrid")
    )
    against: str = setting(
        "builtin", "what ours is compared with (default: {default})", choices=AGAINST
    )
    rounds: int = setting(5, "measured passes per arm and concurrency (default: {default})")
    revision: str = setting("", "with --against revision: a commit of this checkout")
    temperature: float = setting(
        0.0, "above 0, requests are sampled with seeds (default: {default})"
    )
    prompts: int = setting(0, "prompts of the pair; 0 for twice as many as run at once, 4 at least")


def run(options: Options) -> dict[str, Any]:
    """Raises RuntimeError if the two servers' outputs differ, ConfigError if git does not know the
    revision."""
    pair = demo_pair(options.model)
    # To stream the whole text with every step costs the slower arm more than the faster one.
    flags: dict[str, FlagValue] = {"--incremental-streaming-output": True}
    if options.temperature:
        # A seed alone decides the tokens, and the width is fixed.
        flags["--enable-deterministic-inference"] = True
    ours = demo_config(pair, dflash=True).with_flags(flags)
    with ExitStack() as stack:
        other = ours.with_flags(AGAINST[options.against])
        if options.against == "revision":
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            unpack(options.revision, tree)
            other = replace(ours, env={**ours.env, **importing(tree)})
        servers = stack.enter_context(all_at_once({"ours": ours, options.against: other}))
        found = {}
        for n in LEVELS:
            prompts = pair.prompts[: options.prompts or max(4, 2 * n)]
            found[n] = run_level(servers, prompts, n, options.rounds, options.temperature)
    rows = {f"concurrency_{level}": compare(by_arm) for level, by_arm in found.items()}
    return {"new_tokens": NEW_TOKENS, **rows}


def unpack(revision: str, folder: Path) -> None:
    """Our packages as they were at a commit. Raises ConfigError: git does not know it."""
    packed = ["git", "-C", str(ROOT), "archive", revision, "sglang_dflash", "kernels"]
    archive = subprocess.run(packed, capture_output=True)
    if not revision or archive.returncode:
        raise ConfigError(
            "revision", revision, f"a commit of this checkout ({archive.stderr.decode().strip()})"
        )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def importing(tree: Path) -> dict[str, str]:
    """The environment of a process that loads our packages from there."""
    # `python -m` would put the current folder, which is this checkout, before them.
    # SGLang itself may be found by PYTHONPATH.
    path = f"{tree}:{tree / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_level(
    servers: dict[str, Server],
    prompts: list[str],
    concurrency: int,
    rounds: int,
    temperature: float,
) -> Turns:
    some = [Prompt((text,), chat=False) for text in prompts]

    def turn(name: str, _: int) -> Turn:
        return measure(servers[name], some, concurrency, temperature)

    return exact_turns(servers, rounds, turn, f"{concurrency} at a time, ")


def measure(server: Server, prompts: list[Prompt], concurrency: int, temperature: float) -> Turn:
    """`NEW_TOKENS` tokens after each prompt, its seed its number, `concurrency` requests at a
    time."""
    seeds = {prompt: seed for seed, prompt in enumerate(prompts)}

    def ask(to: Any, prompt: Prompt, _: list[str]) -> load.Answer:
        sampling = {"temperature": temperature, to.SEED: seeds[prompt]}
        return load.SGLang(to.url, sampling).ask(prompt.turns[0], NEW_TOKENS, ignore_eos=True)

    before = draft_side(server)
    done = load.run(load.SGLang(server.url), prompts, concurrency, ask)
    after, draft_ms = draft_side(server), None
    if before is not None and after is not None:
        draft_ms = 1000 * (after[1] - before[1]) / (after[0] - before[0])
    return Turn(**vars(done), concurrency=concurrency, draft_ms=draft_ms)


def draft_side(server: Server) -> tuple[int, float] | None:
    """Decode steps so far, and seconds of the host in propose and commit."""
    shown = server.dflash()
    if "host_seconds" not in shown:
        return None
    seconds = shown["host_seconds"]
    return shown["decode_steps"], seconds.get("propose", 0.0) + seconds.get("commit", 0.0)


def compare(turns: Turns) -> dict[str, Any]:
    """Medians per arm; of the round-by-round ratios (ours / other) the median, the interval that
    holds it with 95 %, the least and the greatest."""
    both = list(zip(*turns.values(), strict=True))
    draft = [a.draft_ms / b.draft_ms for a, b in both if a.draft_ms and b.draft_ms]
    return {
        **{name: figures(many) for name, many in turns.items()},
        **spread("step_time_ratio", [a.step_ms / b.step_ms for a, b in both]),
        **spread("throughput_ratio", [a.tokens_per_second / b.tokens_per_second for a, b in both]),
        **(spread("draft_time_ratio", draft) if draft else {}),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The interval is that of the sign test: half of all values are below the true median, so that
    the number of those drawn below it is binomial."""
    from scipy.stats import binom

    ordered = sorted(values)
    out = max(0, int(binom.ppf(0.025, len(values), 0.5)) - 1)
    of = {
        name: statistics.median(ordered),
        f"{name}_low": ordered[out],
        f"{name}_high": ordered[-1 - out],
        f"{name}_min": ordered[0],
        f"{name}_max": ordered[-1],
    }
    return {key: round(value, 4) for key, value in of.items()}


def figures(turns: list[Turn]) -> dict[str, float]:
    draft = [one.draft_ms for one in turns if one.draft_ms]
    counts = sum((one.speculation for one in turns), VerifySteps())
    return {
        "step_ms": round(statistics.median(one.step_ms for one in turns), 3),
        "tokens_per_second": round(statistics.median(p.tokens_per_second for p in turns), 2),
        "acceptance_length": round(counts.acceptance_length or 1.0, 3),
        **({"draft_ms": round(statistics.median(draft), 3)} if draft else {}),
    }


def table(result: dict[str, Any]) -> list[str]:
    levels = [f"concurrency_{level}" for level in LEVELS]
    return [f"{level} {name}: {of}" for level in levels for name, of in result[level].items()]
