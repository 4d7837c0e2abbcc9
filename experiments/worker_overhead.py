"""Our worker against SGLang's built-in one, replay against snapshots, itself, or another revision.

Same platform, same pair, same prompts, greedy or with a seed per prompt. Both servers are up and
take turns; the waiting one sleeps. Nothing is reported unless their outputs are equal. `--against
itself` shows the noise: the ratios of two equal servers. `--against revision --revision REV`
compares with our worker at that commit of this checkout.

`draft_ms` is the host's time in propose and commit per decode step of a batch, from /server_info:
on a CPU, the draft side of the step. The built-in worker does not report it.
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
class OverheadPass(BenchPass):
    """A pass with the time of the draft side.

    `draft_ms`: milliseconds of the draft side per decode step; None if the worker does not report
    it.
    """

    concurrency: int
    draft_ms: float | None

    @property
    def step_ms(self) -> float:
        """Mean time between a request's verify steps, prefill included, in milliseconds."""
        return 1000 * self.seconds * self.concurrency / self.speculation.steps


# Arm -> one pass per round.
Turns = dict[str, list[OverheadPass]]


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
    # Streaming the whole text again at every step would slow down the slower arm more.
    flags: dict[str, FlagValue] = {"--incremental-streaming-output": True}
    if options.temperature:
        # Then only a seed decides the tokens, and the width is fixed.
        flags["--enable-deterministic-inference"] = True
    own_config = demo_config(pair, dflash=True).with_flags(flags)
    with ExitStack() as stack:
        other_config = own_config.with_flags(AGAINST[options.against])
        if options.against == "revision":
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            unpack(options.revision, tree)
            other_config = replace(own_config, env={**own_config.env, **environment_of(tree)})
        servers = stack.enter_context(
            all_at_once({"ours": own_config, options.against: other_config})
        )
        turns_of_level = {}
        for n in LEVELS:
            prompts = pair.prompts[: options.prompts or max(4, 2 * n)]
            turns_of_level[n] = run_level(servers, prompts, n, options.rounds, options.temperature)
    rows = {f"concurrency_{level}": compare(by_arm) for level, by_arm in turns_of_level.items()}
    return {"new_tokens": NEW_TOKENS, **rows}


def unpack(revision: str, folder: Path) -> None:
    """Unpack our packages as of a commit. Raises ConfigError if git does not know it."""
    packed = ["git", "-C", str(ROOT), "archive", revision, "sglang_dflash", "kernels"]
    archive = subprocess.run(packed, capture_output=True)
    if not revision or archive.returncode:
        raise ConfigError(
            "revision", revision, f"a commit of this checkout ({archive.stderr.decode().strip()})"
        )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def environment_of(tree: Path) -> dict[str, str]:
    """Return environment variables of a process that loads our packages from `tree`."""
    # PYTHONSAFEPATH: `python -m` would search the current folder, this checkout, first. The rest of
    # PYTHONPATH stays, because SGLang itself may be found by it.
    path = f"{tree}:{tree / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_level(
    servers: dict[str, Server],
    prompts: list[str],
    concurrency: int,
    rounds: int,
    temperature: float,
) -> Turns:
    measured_prompts = [Prompt((text,), chat=False) for text in prompts]

    def turn(name: str, _: int) -> OverheadPass:
        return measure(servers[name], measured_prompts, concurrency, temperature)

    return exact_turns(servers, rounds, turn, f"{concurrency} at a time, ")


def measure(
    server: Server, prompts: list[Prompt], concurrency: int, temperature: float
) -> OverheadPass:
    """Measure a pass of `NEW_TOKENS` new tokens per prompt. A prompt's seed is its index."""
    seeds = {prompt: seed for seed, prompt in enumerate(prompts)}

    def ask(to: Any, prompt: Prompt, _: list[str]) -> load.Answer:
        sampling = {"temperature": temperature, to.SEED: seeds[prompt]}
        return load.SGLang(to.url, sampling).ask(prompt.turns[0], NEW_TOKENS, ignore_eos=True)

    before = draft_side(server)
    bench_pass = load.run(load.SGLang(server.url), prompts, concurrency, ask)
    after, draft_ms = draft_side(server), None
    if before is not None and after is not None:
        draft_ms = 1000 * (after[1] - before[1]) / (after[0] - before[0])
    return OverheadPass(**vars(bench_pass), concurrency=concurrency, draft_ms=draft_ms)


def draft_side(server: Server) -> tuple[int, float] | None:
    """Return the decode steps so far, and the host's seconds in propose and commit; None if the
    worker does not report them."""
    report = server.dflash()
    if "host_seconds" not in report:
        return None
    seconds = report["host_seconds"]
    return report["decode_steps"], seconds.get("propose", 0.0) + seconds.get("commit", 0.0)


def compare(turns: Turns) -> dict[str, Any]:
    """Return medians per arm, and the `spread` of the ratios (ours / other) of single rounds."""
    pairs = list(zip(*turns.values(), strict=True))
    draft = [a.draft_ms / b.draft_ms for a, b in pairs if a.draft_ms and b.draft_ms]
    return {
        **{name: figures(turns_of_arm) for name, turns_of_arm in turns.items()},
        **spread("step_time_ratio", [a.step_ms / b.step_ms for a, b in pairs]),
        **spread("throughput_ratio", [a.tokens_per_second / b.tokens_per_second for a, b in pairs]),
        **(spread("draft_time_ratio", draft) if draft else {}),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return median, minimum, maximum and the median's 95 % interval, by the sign test: the number
    of values below the true median is binomial."""
    from scipy.stats import binom

    ordered = sorted(values)
    out = max(0, int(binom.ppf(0.025, len(values), 0.5)) - 1)
    interval = {
        name: statistics.median(ordered),
        f"{name}_low": ordered[out],
        f"{name}_high": ordered[-1 - out],
        f"{name}_min": ordered[0],
        f"{name}_max": ordered[-1],
    }
    return {key: round(value, 4) for key, value in interval.items()}


def figures(turns: list[OverheadPass]) -> dict[str, float]:
    draft = [turn.draft_ms for turn in turns if turn.draft_ms]
    counts = sum((turn.speculation for turn in turns), VerifySteps())
    return {
        "step_ms": round(statistics.median(turn.step_ms for turn in turns), 3),
        "tokens_per_second": round(statistics.median(p.tokens_per_second for p in turns), 2),
        "acceptance_length": round(counts.acceptance_length or 1.0, 3),
        **({"draft_ms": round(statistics.median(draft), 3)} if draft else {}),
    }


def table(result: dict[str, Any]) -> list[str]:
    levels = [f"concurrency_{level}" for level in LEVELS]
    return [
        f"{level} {name}: {figure}" for level in levels for name, figure in result[level].items()
    ]
