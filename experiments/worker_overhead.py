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
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.runner import all_at_once, take_turns
from sglang_dflash.bench.server import FlagValue, demo_config
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.facts.command_line import setting
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
    """One pass over the prompts.

    Attributes:
        verify_steps: target forwards per request, summed.
        draft_ms: milliseconds of the draft side per decode step; None if the worker does not tell.
    """

    outputs: list[list[int]]
    seconds: float
    verify_steps: int
    concurrency: int
    draft_ms: float | None

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def step_ms(self) -> float:
        """Mean time between a request's verify steps, prefill included, in milliseconds."""
        return 1000 * self.seconds * self.concurrency / self.verify_steps


# Arm -> one pass per round.
Passes = dict[str, list[Pass]]


@dataclass(frozen=True)
class Options:
    model: str = setting("dense", "which embedded pair (default: {default})")
    against: str = setting(
        "builtin", "what ours is compared with (default: {default})", choices=AGAINST
    )
    rounds: int = setting(5, "measured passes per arm and concurrency (default: {default})")
    revision: str = setting("", "with --against revision: a commit of this checkout")


def run(options: Options) -> dict[str, Any]:
    """Raises RuntimeError if the two servers' outputs differ, ConfigError if git does not know the
    revision."""
    pair = demo_pair(options.model)
    ours = demo_config(pair, dflash=True)
    with ExitStack() as stack:
        other = ours.with_flags(AGAINST[options.against])
        if options.against == "revision":
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            unpack(options.revision, tree)
            other = replace(ours, env={**ours.env, "PYTHONPATH": f"{tree}:{tree / 'kernels'}"})
        servers = stack.enter_context(all_at_once({"ours": ours, options.against: other}))
        found = {n: run_level(servers, pair.prompts, n, options.rounds) for n in LEVELS}
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


def run_level(
    servers: dict[str, Server], prompts: list[str], concurrency: int, rounds: int
) -> Passes:
    prompts = prompts[: max(4, 2 * concurrency)]

    def one_pass(name: str, _: int) -> Pass:
        return measure(servers[name], prompts, concurrency)

    take_turns(servers, 1, one_pass, f"{concurrency} at a time, warm-up, ")
    passes = take_turns(servers, rounds, one_pass, f"{concurrency} at a time, ")
    if any(a.outputs != b.outputs for a, b in zip(*passes.values(), strict=True)):
        raise RuntimeError("the two servers' outputs differ: no figure without exactness")
    return passes


def measure(server: Server, prompts: list[str], concurrency: int) -> Pass:
    """`NEW_TOKENS` tokens after each prompt, greedy, `concurrency` requests at a time."""

    def ask(prompt: str) -> dict[str, Any]:
        return server.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)

    before, began = draft_side(server), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(ask, prompts))
    seconds, after, draft_ms = time.perf_counter() - began, draft_side(server), None
    if before is not None and after is not None:
        draft_ms = 1000 * (after[1] - before[1]) / (after[0] - before[0])
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    outputs = [answer["output_ids"] for answer in answers]
    return Pass(outputs, seconds, steps, concurrency, draft_ms)


def draft_side(server: Server) -> tuple[int, float] | None:
    """Decode steps so far, and seconds of the host in propose and commit."""
    shown = server.dflash()
    if "host_seconds" not in shown:
        return None
    seconds = shown["host_seconds"]
    return shown["decode_steps"], seconds.get("propose", 0.0) + seconds.get("commit", 0.0)


def compare(passes: Passes) -> dict[str, Any]:
    """Medians per arm; medians, least and greatest of the round-by-round ratios (ours / other)."""
    both = list(zip(*passes.values(), strict=True))
    draft = [a.draft_ms / b.draft_ms for a, b in both if a.draft_ms and b.draft_ms]
    return {
        **{name: figures(many) for name, many in passes.items()},
        **spread("step_time_ratio", [a.step_ms / b.step_ms for a, b in both]),
        **spread("throughput_ratio", [a.tokens_per_second / b.tokens_per_second for a, b in both]),
        **(spread("draft_time_ratio", draft) if draft else {}),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    of = {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {key: round(value, 4) for key, value in of.items()}


def figures(passes: list[Pass]) -> dict[str, float]:
    draft = [one.draft_ms for one in passes if one.draft_ms]
    # The first token of each answer is the prefill's.
    tokens = sum(len(output) - 1 for one in passes for output in one.outputs)
    counts = VerifySteps(sum(one.verify_steps for one in passes), tokens)
    return {
        "step_ms": round(statistics.median(one.step_ms for one in passes), 3),
        "tokens_per_second": round(statistics.median(p.tokens_per_second for p in passes), 2),
        "acceptance_length": round(counts.acceptance_length or 1.0, 3),
        **({"draft_ms": round(statistics.median(draft), 3)} if draft else {}),
    }


def table(result: dict[str, Any]) -> list[str]:
    levels = [f"concurrency_{level}" for level in LEVELS]
    return [f"{level} {name}: {of}" for level in levels for name, of in result[level].items()]
