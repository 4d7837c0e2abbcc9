"""Profile of a running server's steps, on the host and on the GPU, by SGLang's own profiler.

    python -m experiments step_profile --base-url ours=http://127.0.0.1:30000

Random prompts, sent at once, while `/start_profile` traces the scheduler: one trace per server and
concurrency. The server must run on this machine, which reads its trace. The profiler slows the
host, so that its times compare servers with each other only.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.tools.bench import load
from sglang_dflash.tools.bench.settings import BenchSettings

# Categories of a trace's events.
RUNTIME = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Seconds until a trace is written.
WRITTEN_S = 120
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    base_url: tuple[str, ...] = setting(
        (), "a running SGLang server; repeat for more", metavar="NAME=URL"
    )
    concurrency: str = setting("1,32", "requests at a time (default: {default})")
    prompt_tokens: int = setting(512, "of a prompt (default: {default})")
    vocabulary: int = setting(32000, "prompts have ids below it (default: {default})")
    steps: int = setting(24, "iterations of the scheduler that are traced (default: {default})")


def run(options: Options) -> dict[str, Any]:
    """Raises ConfigError if no server is given or an option is out of range, Failed if a server
    does not answer or writes no trace."""
    pairs = (named.rstrip("/").split("=", 1) for named in options.base_url if "=" in named)
    urls = dict(pairs)
    if not urls or len(urls) < len(options.base_url):
        required = "NAME=URL is required, every name once"
        raise ConfigError("base_url", options.base_url or None, required)
    levels = BenchSettings(concurrency=options.concurrency).levels
    servers = {
        name: {
            str(level): profile(load.SGLang(url.rstrip("/")), level, options) for level in levels
        }
        for name, url in urls.items()
    }
    return {"levels": list(levels), "servers": servers}


def profile(server: load.SGLang, requests: int, options: Options) -> dict[str, dict[str, float]]:
    """Trace a server while it answers that many requests. See `summary`."""

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        # The second request arrives when a short answer has ended. A step commits a token or more.
        for tokens in (max(1, options.steps // 4), 16 * options.steps):
            prompt = draw.choices(range(options.vocabulary), k=options.prompt_tokens)
            server.ask(prompt, tokens, ignore_eos=True)

    def ask_at_once(first_seed: int) -> None:
        with ThreadPoolExecutor(requests) as pool:
            list(pool.map(ask, range(first_seed, first_seed + requests)))

    ask_at_once(0)
    with tempfile.TemporaryDirectory() as folder:
        body = {
            "output_dir": folder,
            "num_steps": options.steps,
            "activities": ["CPU", "GPU"],
            "with_stack": False,
            "record_shapes": False,
        }
        started = load.send_request("POST", f"{server.url}/start_profile", json=body)
        if not started.ok:
            raise Failed(f"{server.url}: /start_profile: {started.text[:300]}")
        ask_at_once(requests)
        return summary(read_trace(Path(folder)))


def read_trace(folder: Path) -> list[Event]:
    """Return the events of the trace that is written there. Raises Failed if there is none."""
    deadline = time.monotonic() + WRITTEN_S
    while time.monotonic() < deadline:
        for path in folder.rglob("*.gz"):
            try:
                events: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
                return events
            except (EOFError, ValueError, gzip.BadGzipFile):  # It is still being written.
                pass
        time.sleep(1)
    raise Failed(f"no trace was written within {WRITTEN_S} s")


def summary(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Return medians over the scheduler's iterations: of prefills, of prefills that follow a step,
    and of steps.

    `host_ms`: of `run_batch`. `until_done_ms`: from its beginning until the GPU has done all that
    it launched. `waits`: calls in which the host waits for the GPU, from one
    `run_batch` to the next; `waits_in_run_batch`: those inside. `pageable_copies`: copies from
    memory that is not pinned. `gpu_busy_ms`: time of all kernels, copies and fills.
    """
    timed = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    notes = [e for e in timed if e.get("cat") == "user_annotation"]
    runtime = [e for e in timed if e.get("cat") in RUNTIME]
    launched_at = {e.get("args", {}).get("correlation"): e["ts"] for e in runtime}
    device = [e for e in timed if e.get("cat") in DEVICE]
    batches = [e for e in notes if e["name"] == "scheduler.run_batch"]
    rows: dict[str, list[dict[str, float]]] = {"prefill": [], "prefill_after_step": [], "step": []}
    phase = "prefill"
    for batch, following in pairwise(batches):
        begin, end, until = batch["ts"], batch["ts"] + batch["dur"], following["ts"]
        calls = [e for e in runtime if begin <= e["ts"] < until]
        # A kernel belongs to the iteration that launched it.
        work = [
            e
            for e in device
            if begin <= launched_at.get(e.get("args", {}).get("correlation"), -1) < until
        ]
        is_prefill = any("EXTEND" in e["name"] for e in notes if begin <= e["ts"] < end)
        follows_step = is_prefill and phase == "step"
        phase = "step" if not is_prefill else "prefill_after_step" if follows_step else "prefill"
        done = max([end, *(e["ts"] + e["dur"] for e in work)])
        rows[phase].append(
            {
                "host_ms": batch["dur"] / 1e3,
                "until_done_ms": (done - begin) / 1e3,
                "graph_launches": named(calls, "GraphLaunch"),
                "kernel_launches": named(calls, "LaunchKernel"),
                "copies": named(calls, "MemcpyAsync"),
                "waits": named(calls, "Synchronize"),
                "waits_in_run_batch": named([e for e in calls if e["ts"] < end], "Synchronize"),
                "allocations": named(calls, "Malloc", "HostAlloc", "cudaFree"),
                "pageable_copies": named(work, "Pageable"),
                "gpu_busy_ms": sum(e["dur"] for e in work) / 1e3,
            }
        )
    return {
        phase: {
            "iterations": len(measured),
            **{
                name: round(statistics.median(row[name] for row in measured), 3)
                for name in measured[0]
            },
        }
        for phase, measured in rows.items()
        if measured
    }


def named(events: Iterable[Event], *parts: str) -> int:
    """The number of events whose names have one of these parts."""
    return sum(any(part in event["name"] for part in parts) for event in events)


def table(result: dict[str, Any]) -> list[str]:
    return [
        f"{name}, {level} at a time, {phase}: {figures['host_ms']:g} ms of the host, "
        f"{figures['kernel_launches']:g} kernel and {figures['graph_launches']:g} graph launches, "
        f"{figures['copies']:g} copies, {figures['waits']:g} waits "
        f"({figures['waits_in_run_batch']:g} in run_batch), GPU busy {figures['gpu_busy_ms']:g} ms"
        # Results from before 2026-11-29 do not have this figure.
        + (f", done after {figures['until_done_ms']:g} ms" if "until_done_ms" in figures else "")
        for name, levels in result["servers"].items()
        for level, phases in levels.items()
        for phase, figures in phases.items()
    ]
