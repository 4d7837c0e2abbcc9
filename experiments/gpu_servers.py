"""SGLang's servers at a published shape: plain decoding, its DFLASH worker and ours.

    python -m experiments gpu_servers --out gpu_servers.json
    python -m experiments gpu_servers --target Qwen/Qwen3.5-27B --flags "--mem-fraction-static 0.88"
    python -m experiments gpu_servers --variant "adaptive=--speculative-dflash-width adaptive"

Needs SGLang, but neither weights nor a network: weights and prompts are random, the same for all
servers, and each verify step commits a given number of tokens. The servers run one after another
with the same flags. A server that fails is reported with the end of its log, and the others still
run. --out is written after each server.
"""

from __future__ import annotations

import itertools
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.shapes import context_of, folder_of, write_draft_weights
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.common.progress import progress_bar
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench import load
from sglang_dflash.tools.bench.arms import arms_of
from sglang_dflash.tools.bench.compiled import count_compilations, measure_settled
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.bench.load import Answer, BenchPass
from sglang_dflash.tools.bench.server import Server, ServerConfig
from sglang_dflash.tools.bench.settings import BenchSettings

ARMS = ("ar", "builtin", "dflash")
# Options that are also `BenchSettings`.
SHARED = ("dtype", "simulated_acceptance", "concurrency", "rounds", "max_new_tokens")
SESSION_TOKENS = 65536
# In milliseconds.
TIMES = "ms of a step, of one without prefills; to the first token"
# Lines of a server's log that are kept, and characters of a line.
LINES, COLUMNS = 80, 300
# Log lines of single batches and requests, which are left out.
PREFILL = "Prefill batch"
CHATTER = (PREFILL, "Decode batch", "POST /", "GET /")


@dataclass(frozen=True)
class Options:
    target: str = setting(
        "Qwen/Qwen3-8B", "a published target, or a folder with a config.json (default: {default})"
    )
    draft: str = setting("", "a published draft, or a folder (default: the target's)")
    arms: str = setting(
        ",".join(ARMS),
        "ar is plain decoding, builtin SGLang's worker, dflash ours (default: {default})",
    )
    simulated_acceptance: float = setting(
        4.0, "tokens that a verify step commits (default: {default})"
    )
    concurrency: str = setting("1,8,32", "requests at a time (default: {default})")
    prompt_tokens: int = setting(512, "of a prompt (default: {default})")
    max_new_tokens: int = setting(128, "of an answer (default: {default})")
    rounds: int = setting(2, "measured passes per server and concurrency (default: {default})")
    dtype: str = setting("bfloat16", "default: {default}", choices=("bfloat16", "float16"))
    flags: str = setting("", "of every server, in quotes")
    variant: tuple[str, ...] = setting(
        (), "one more server of ours, with further flags; repeat for more", metavar="NAME=FLAGS"
    )
    start_timeout_s: float = setting(600.0, "for a server to start (default: {default})")


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Run all servers. Raises ConfigError if too little is known about a model, or an option is out
    of range."""
    import torch

    with tempfile.TemporaryDirectory() as home:
        draft = options.draft or published_draft(options.target)
        target = folder_of("target", options.target, Path(home))
        accelerator = torch.cuda.is_available()
        models = {"target": str(target), "draft": str(folder_of("draft", draft, Path(home)))}
        if Path(models["draft"]).parent == Path(home):
            write_draft_weights(Path(models["draft"]))
        settings = settings_of(options, models, accelerator)
        arms = servers_of(settings, options.variant, accelerator)
        vocabulary = TargetGeometry.from_pretrained(target).vocab_size
        result = {
            "target": options.target,
            "draft": draft,
            "levels": list(settings.levels),
            "simulated_acceptance": options.simulated_acceptance,
            "session_tokens": SESSION_TOKENS,
        }
        servers: dict[str, Any] = {}
        # Reading the accelerator's name for a result takes some of its memory. With a result before
        # the first server, all servers find the same free memory.
        yield {**result, "servers": servers}
        with progress_bar(len(arms) * len(settings.levels), steady=False) as bar:
            for name, config in arms.items():
                measurement = Measurement(name, options, settings.levels, vocabulary, bar)
                servers[name] = measurement.measure(config, Path(home) / f"{name}.log")
                yield {**result, "servers": servers, **ratios(servers)}


def settings_of(options: Options, models: dict[str, str], accelerator: bool) -> BenchSettings:
    """Return settings of `bench` for these servers. Raises ConfigError if an option is out of
    range."""
    arms = tuple(options.arms.split(","))
    if not set(arms) <= set(ARMS):
        raise ConfigError("arms", options.arms, f"some of {','.join(ARMS)} are required")
    shared = {name: getattr(options, name) for name in SHARED}
    settings = BenchSettings.for_machine({**models, **shared, "arms": arms}, accelerator)
    requests = max(settings.levels)
    # SGLang's default depends on the worker, so all servers get the same flag.
    bounds = ["--skip-tokenizer-init", "--max-running-requests", str(requests)]
    if any(Path(models["draft"]).glob("*.safetensors")):
        # So that both workers draft, and verify, the same tokens: see `write_draft_weights`.
        bounds += ["--speculative-draft-load-format", "auto"]
    # SGLang's worker refuses a draft that was made for shorter contexts than the target.
    context = context_of(map(Path, models.values()))
    if context is not None:
        bounds += ["--context-length", str(context)]
    return replace(settings, server_flags=(*bounds, *shlex.split(options.flags)))


def servers_of(
    settings: BenchSettings, variants: Sequence[str], accelerator: bool
) -> dict[str, ServerConfig]:
    """Return the server of each arm, then those of the variants. Raises ConfigError if a variant
    has no name of its own, or the environment simulates acceptance."""

    def started(*names: str) -> dict[str, ServerConfig]:
        arms = arms_of(replace(settings, arms=names), accelerator)
        return {name: arm for name, arm in arms.items() if isinstance(arm, ServerConfig)}

    servers, ours = started(*settings.arms), started("dflash")["dflash"]
    for variant in variants:
        name, _, flags = variant.partition("=")
        if not flags.startswith("--") or not name or name in {*servers, *ARMS}:
            required = 'NAME="--FLAG ...", with a name that no other server has, is required'
            raise ConfigError("variant", variant, required)
        servers[name] = replace(ours, extra_args=(*ours.extra_args, *shlex.split(flags)))
    return servers


@dataclass(frozen=True)
class Measured(BenchPass):
    """`prefill_batches`: prefills in that time, by the server's log. Requests that arrive together
    are prefilled in one or in several, as they happen to come."""

    prefill_batches: int = field(kw_only=True)


@dataclass(frozen=True)
class Measurement:
    """The measurement of one server."""

    name: str
    options: Options
    levels: tuple[int, ...]
    vocabulary: int
    bar: Any

    def measure(self, config: ServerConfig, log: Path) -> dict[str, Any]:
        """Start the server and measure it. Returns its report, with `failed` if it failed."""
        report: dict[str, Any] = {"flags": config.args(), "environment": dict(config.env)}
        began = time.monotonic()
        self.bar.set_description(f"starting {self.name}")
        try:
            with Server(config, self.options.start_timeout_s, log) as server:
                report["start_s"] = round(time.monotonic() - began, 1)
                report |= read_report(load.SGLang(server.url))
                levels = report["levels"] = {}
                for level in self.levels:
                    self.bar.set_description(f"{self.name}, {level} at a time")
                    passes = self.passes(load.SGLang(server.url, log=log), log, level)
                    levels[str(level)] = figures(passes)
                    self.bar.update()
        except Failed as error:
            report["failed"] = str(error).partition("\n")[0]
        return {**report, "log": last_lines(log)}

    def passes(self, server: load.SGLang, log: Path, concurrency: int) -> list[Measured]:
        """Return the measured passes at a concurrency, after a whole pass to warm up. A shorter one
        would leave batch shapes whose kernels are compiled while they are measured."""
        # The text of a prompt is the seed of its tokens.
        prompts = [Prompt((str(seed),), chat=False) for seed in range(max(4, concurrency))]

        def ask(server: load.SGLang, prompt: Prompt, _: list[str]) -> Answer:
            draw = random.Random(prompt.turns[0])
            tokens = draw.choices(range(self.vocabulary), k=self.options.prompt_tokens)
            return server.ask(tokens, self.options.max_new_tokens, ignore_eos=True)

        def one_pass() -> Measured:
            before = prefill_batches(log)
            done = load.run(server, prompts, concurrency, ask)
            return Measured(**vars(done), prefill_batches=prefill_batches(log) - before)

        one_pass()
        passes = list[Measured]()
        for _ in range(self.options.rounds):
            server.flush()
            passes.append(measure_settled(one_pass, server.flush))
        return passes


def read_report(server: load.SGLang) -> dict[str, Any]:
    """Read a server's own report. `sessions`: number of requests of `SESSION_TOKENS` that fit its
    KV pool and its limit of running requests. Raises Failed if it does not answer."""
    report = server.info()
    tokens = report.target_kv_tokens or 0
    running = min((s["effective_max_running_requests_per_dp"] for s in report.states), default=0)
    return {
        **report.machine(),
        "worker": report.set_up(),
        "kv_tokens": tokens,
        "sessions": min(tokens // SESSION_TOKENS, running),
        "running_requests": running,
        "dflash": report.reports[0] if report.reports else None,
    }


def figures(passes: Sequence[Measured]) -> dict[str, Any]:
    """Return medians over passes.

    `step_ms`: milliseconds between a request's steps, without its own prefill but with those of
    others in between, the median over answers. `step_without_prefills_ms`: the median of
    `steps_without_prefills`, None if every step met one. `first_token_ms`: from sending to the
    first token, the median over answers; `first_token_ms_of_passes` has all, ascending.
    `prefill_batches_of_passes`: see `Measured`.
    `compiled_while_measured`: see `count_compilations`.
    """
    answers = [answer for each_pass in passes for answer in each_pass.all_answers]
    undisturbed = [
        step for each_pass in passes for step in steps_without_prefills(each_pass.all_answers)
    ]
    speeds = [each_pass.tokens_per_second for each_pass in passes]
    length = sum((each_pass.speculation for each_pass in passes), VerifySteps()).acceptance_length
    return {
        "tokens_per_second": round(statistics.median(speeds), 2),
        "least_tokens_per_second": round(min(speeds), 2),
        "most_tokens_per_second": round(max(speeds), 2),
        "tokens_per_second_of_passes": [round(speed, 2) for speed in speeds],
        "prefill_batches_of_passes": [each_pass.prefill_batches for each_pass in passes],
        "compiled_while_measured": count_compilations(passes),
        "step_ms": milliseconds(map(step_ms, answers)),
        "step_without_prefills_ms": milliseconds(undisturbed) if undisturbed else None,
        "first_token_ms": milliseconds(1000 * answer.first_token_s for answer in answers),
        "first_token_ms_of_passes": [
            sorted(round(1000 * answer.first_token_s, 1) for answer in each_pass.all_answers)
            for each_pass in passes
        ],
        "acceptance_length": None if length is None else round(length, 3),
    }


def step_ms(answer: Answer) -> float:
    """Milliseconds per step of an answer, without its prefill. A plain step has one token."""
    steps = answer.verify_steps or answer.tokens - 1
    return 1000 * (answer.seconds - answer.first_token_s) / max(1, steps)


def steps_without_prefills(answers: Sequence[Answer]) -> list[float]:
    """Milliseconds between two chunks of an answer, while no other answer waited for its first
    token. A chunk holds the tokens of a step, rarely of more."""
    waits = [(a.chunks_at[0] - a.first_token_s, a.chunks_at[0]) for a in answers if a.chunks_at]
    return [
        1000 * (end - begin)
        for answer in answers
        for begin, end in itertools.pairwise(answer.chunks_at)
        if all(first_token <= begin or end <= sent for sent, first_token in waits)
    ]


def prefill_batches(log: Path) -> int:
    """The number of prefills that a server has logged."""
    return log.read_bytes().count(PREFILL.encode())


def milliseconds(times: Iterable[float]) -> float:
    """Return the median, to a microsecond."""
    return round(statistics.median(times), 3)


def last_lines(log: Path) -> list[str]:
    """Return the end of a server's log, without lines of single batches and requests."""
    # As bytes, because in text mode each update of a progress bar would end a line.
    text = log.read_bytes().decode(errors="replace") if log.exists() else ""
    # Keep the last state of a progress bar.
    lines = [line.rstrip("\r").rpartition("\r")[2][:COLUMNS] for line in text.split("\n")]
    return [line for line in lines if line and not any(words in line for words in CHATTER)][-LINES:]


def ratios(servers: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Return ratios by server and concurrency, where both figures exist. `speedup`: tokens per
    second over plain decoding's. `step_time_ratio`: our step time over SGLang's worker's."""
    levels = {name: server.get("levels", {}) for name, server in servers.items()}

    def ratio(name: str, base: str, figure: str) -> dict[str, float]:
        measured, base_levels = levels.get(name, {}), levels.get(base, {})
        return {
            level: round(measured[level][figure] / base_levels[level][figure], 3)
            for level in measured
            if level in base_levels
        }

    drafting = [name for name in servers if name != "ar"]
    ours = [name for name in drafting if name != "builtin"]
    return {
        "speedup": {name: ratio(name, "ar", "tokens_per_second") for name in drafting},
        "step_time_ratio": {name: ratio(name, "builtin", "step_ms") for name in ours},
    }


def table(result: dict[str, Any]) -> list[str]:
    levels = [str(level) for level in result["levels"]]
    at_a_time = " | ".join(f"{level} at a time" for level in levels)
    sessions = f"sessions of {result['session_tokens']:,}"
    lines = [
        f"{result['target']} with {result['draft']}, random weights; a verify step commits "
        f"{result['simulated_acceptance']:g} tokens (simulated)",
        f"| output tokens/s ({TIMES}) | {at_a_time} | K/V tokens | {sessions} |",
        f"|---|{'---|' * (len(levels) + 2)}",
    ]
    for name, server in result["servers"].items():
        cells = [cell(result, name, level) for level in levels]
        memory = [f"{server[key]:,}" if key in server else "-" for key in ("kv_tokens", "sessions")]
        lines.append(f"| {' | '.join([name, *cells, *memory])} |")
    for name, steps in result.get("step_time_ratio", {}).items():
        step_times = ", ".join(f"{ratio:.3f} at {level}" for level, ratio in steps.items())
        if steps:
            lines.append(f"step time, {name} / SGLang's worker: {step_times}")
    for name, server in result["servers"].items():
        for level, row in server.get("levels", {}).items():
            if row["compiled_while_measured"]:
                count = row["compiled_while_measured"]
                lines.append(f"{name}, {level} at a time: {count} kernels compiled while measured")
        if "failed" in server:
            lines += [f"{name}: {server['failed']}", *(f"  {line}" for line in server["log"][-12:])]
    return lines


def cell(result: dict[str, Any], name: str, level: str) -> str:
    """Tokens per second, the ratio to plain decoding, and the times of a step, of a step without
    prefills, and to the first token."""
    figures = result["servers"][name].get("levels", {}).get(level)
    if figures is None:
        return "-"
    speedup = result["speedup"].get(name, {}).get(level)
    ratio = "" if speedup is None else f", {speedup:.2f}x"
    # Results before 2026-11-28 have only the first of the three.
    names = ("step_ms", "step_without_prefills_ms", "first_token_ms")
    times = (figures.get(name) for name in names)
    step, undisturbed, first_token = ("-" if ms is None else f"{ms:.2f}" for ms in times)
    return f"{figures['tokens_per_second']:,.1f}{ratio} ({step}, {undisturbed}; {first_token})"


def failure(result: dict[str, Any]) -> str | None:
    """The servers that failed."""
    failed = [name for name, server in result["servers"].items() if "failed" in server]
    return f"failed: {', '.join(failed)}" if failed else None
