"""What to run first on a GPU: checks of every kernel, times of the draft side against their floor.

    python -m experiments gpu --dry-run
    python -m experiments gpu --out gpu.json

Parts, one after the other: bandwidth of a copy; the start-up check at published shapes; replay of
recurrent layers against torch; propose, commit and absorb, eager and from CUDA graphs, against the
fewest bytes that they must move. Weights are random. SGLang is not needed, and nothing is fetched.
Each part is shown on stderr when it ends; --only runs some of them. The exit status is 1 if a part
failed; the other parts are reported.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments import traffic
from experiments.drafters import TINY, Load, Loaded, loaded, random_head, random_model
from experiments.traffic import SHAPES, config_of
from sglang_dflash.drafting.attention.backend import Capabilities, choose_attention
from sglang_dflash.drafting.groups import clear
from sglang_dflash.drafting.recurrent.replay import Moves, RecurrentLayers, VerifyInputs
from sglang_dflash.drafting.recurrent.replay import fold_ as torch_fold_
from sglang_dflash.drafting.self_check import check_attention, check_ops, check_recording
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.gpu.backends import ATTENTION

LOADS = (
    Load(1, 4096, None),
    Load(1, 4096, 4096),
    Load(1, 131072, 4096),
    Load(8, 4096, None),
    Load(32, 32768, None),
    Load(32, 4096, 4096),
    Load(32, 131072, 4096),
)
TINY_LOADS = (Load(1, 96, None), Load(3, 200, 64))
PHASES = ("propose", "commit", "absorb", "step")
REPEATS = 30
# Bytes of a copy that measures bandwidth; two of these must fit.
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}


@dataclass(frozen=True)
class Options:
    dry_run: bool = setting(False, "print the fewest bytes of each part, measure nothing")
    tiny: bool = setting(False, "try the command: a tiny draft on the CPU")
    only: str = setting("", "run the parts whose names begin so, such as check or phases/Qwen3-8B")


class Part(NamedTuple):
    """What a part measures, and the fewest bytes of its phases if it has any."""

    run: Callable[[], dict[str, Any]]
    floors: dict[str, int] | None = None


# ---- the parts


def plan(tiny: bool) -> dict[str, Part]:
    """All parts by name, in order."""
    device = torch.device("cpu" if tiny else "cuda")
    dtype = torch.float32 if tiny else torch.bfloat16
    drafts = {"tiny": DraftConfig.from_dict(TINY)} if tiny else {
        name.removeprefix("z-lab/"): config_of(name) for name in SHAPES
    }  # fmt: skip
    parts = {"bandwidth": Part(lambda: {"bytes_per_s": copy_bandwidth(device)})}
    for name, config in drafts.items():
        parts[f"check/{name}"] = Part(partial(self_check, config, device, dtype))
    shape = (2, 4, 2, 1, 16) if tiny else (8, 16, 48, 16, 128)
    parts["fold"] = Part(partial(fold, device, *shape))
    for name, config in drafts.items():
        for load in TINY_LOADS if tiny else LOADS:
            run = partial(phases, config, load, device, dtype)
            least = floors(config, load, dtype.itemsize)
            parts[f"phases/{name}/{load.name}"] = Part(run, least)
    return parts


def self_check(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The start-up check of a server, for every attention backend.

    Returns:
        `ops`: the operations that were compared; `attention`: by backend "as torch", or why it does
        not run here; `failed` if one runs and differs, or breaks.
    """
    model = random_model(config, device, dtype)
    head, found, failed = random_head(model), {}, []
    ops = check_ops(model, config.block_size, config.block_size)
    for name in ATTENTION:
        try:
            choose_attention(name, config, device, ATTENTION)
            # For recorded steps; the check of attention takes shorter requests.
            load = Load(requests=4, context=256, window=None)
            one = loaded(model, head, load, name, device)
        # A package may be missing, or be for another GPU.
        except (ConfigError, ImportError) as error:
            found[name] = str(error)
            continue
        try:
            found[name] = _compare(one, ATTENTION[name].capabilities, device)
        # One backend that breaks must not hide what the others do.
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            failed.append(f"{name}: {found[name]}")
    result: dict[str, Any] = {"ops": ops, "attention": found}
    return result | {"failed": "; ".join(failed)} if failed else result


def _compare(one: Loaded, can: Capabilities, device: torch.device) -> str:
    """Attention against torch's, and on a GPU a recorded step against an eager one. Raises
    SelfCheckFailed."""
    drafter, table = one.drafter, one.known.req_to_token
    clear(drafter.groups)
    for group in drafter.groups:
        check_attention(drafter.model, drafter.block_size, group)
    if device.type != "cuda" or not can.capturable:
        return "as torch, not recorded"
    graphed = one.graphed(CudaGraphs(), table.shape[1])
    check_recording(drafter, graphed, table, (one.load.requests,))
    if graphed.eager or not graphed.replays["propose"]:
        raise RuntimeError("the proposal that was to be compared had no recording")
    return "as torch, recorded as eager"


def fold(
    device: torch.device, requests: int, block: int, depth: int, heads: int, dim: int
) -> dict[str, Any]:
    """Replay of recurrent layers (Gated DeltaNet): the kernel's error against torch, and its time
    beside a copy of snapshots.

    Args:
        depth: layers.
        heads: key heads; there are three times as many value heads.
        dim: of a head.
    """
    if device.type == "cuda":
        from dflash_kernels.gated_delta_fold import fold_
    else:
        fold_ = torch_fold_
    value_heads, width = 3 * heads, 4
    channels = 2 * heads * dim + value_heads * dim

    def normal(*size: int) -> Tensor:
        return torch.randn(depth, *size, device=device)

    layers = RecurrentLayers(
        normal(channels, width), None, "silu", normal(value_heads), normal(value_heads),
        heads, value_heads, dim, dim,
    )  # fmt: skip
    gates = normal(2, requests, block, value_heads).transpose(0, 1)
    kept = VerifyInputs(
        normal(requests, channels, width - 1), normal(requests, block, channels), *gates
    )
    states = normal(requests, value_heads, dim, dim)
    rows = torch.arange(requests, device=device)
    lengths = torch.full((requests,), block // 2, device=device)
    given = kept, Moves(rows, rows, rows, lengths)
    ours, twins = states.clone(), states.clone()
    fold_(layers, ours, *given)
    torch_fold_(layers, twins, *given)
    error = (ours - twins).abs().max().item()
    snapshots = states[:, :, None].expand(-1, -1, block, -1, -1, -1).contiguous()
    kernel_ms = milliseconds(device, lambda: fold_(layers, ours, *given))
    copy_ms = milliseconds(device, lambda: states.copy_(snapshots[:, rows, lengths - 1]))
    return {
        "largest_error": round(error, 6),
        "kernel_ms": round(kernel_ms, 4),
        "snapshot_copy_ms": round(copy_ms, 4),
    }


def floors(config: DraftConfig, load: Load, itemsize: int) -> dict[str, int]:
    """The fewest bytes of each phase, and of the step that they make up."""
    found = traffic.floors(config, *load, itemsize)
    return found | {"step": sum(found.values())}


def phases(
    config: DraftConfig, load: Load, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Times of the phases and of a whole step under one load, as a server without a flag for
    attention runs it.

    Returns:
        By phase `floor_bytes`, `eager_ms` and, on a GPU, `graph_ms`; that of a `step` includes the
        copies into static buffers. `host_waits`: what makes the host wait for the GPU in an eager
        step, or None.
    """
    name = choose_attention(None, config, device, ATTENTION)
    model = random_model(config, device, dtype)
    one = loaded(model, random_head(model), load, name, device)
    runs: dict[str, Callable[[], None]] = {**one.phases(), "step": one.step(one.drafter)}
    # The first step compiles and allocates.
    runs["step"]()
    result: dict[str, Any] = {"attention": name, "host_waits": None}
    if device.type == "cuda":
        result["host_waits"] = waits_for_the_device(runs["step"])
    recorded = device.type == "cuda" and ATTENTION[name].capabilities.capturable
    for phase, floor in floors(config, load, dtype.itemsize).items():
        result[phase] = {
            "floor_bytes": floor,
            "eager_ms": round(milliseconds(device, runs[phase]), 5),
        }
        if recorded:
            replay = (
                _recorded_step(one) if phase == "step" else CudaGraphs().record([runs[phase]])[0]
            )
            result[phase]["graph_ms"] = round(milliseconds(device, replay), 5)
    return result


def _recorded_step(one: Loaded) -> Callable[[], None]:
    graphed = one.graphed(CudaGraphs())
    step = one.step(graphed)
    step()
    if graphed.eager:
        raise RuntimeError(f"{one.load.name}: the proposal had no recording")
    return step


# ---- timing


class CudaGraphs:
    """A `Recorder` by CUDA graphs, which share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [self._record(run) for run in runs]

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Kernels are compiled and libraries initialized before the capture.
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        torch.cuda.synchronize()
        return graph.replay


def milliseconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of `REPEATS` runs; the first three are not counted.

    On CUDA by events, so what the host does meanwhile counts only if the device waits for it.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(_on_the_host(run) for _ in range(REPEATS))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    torch.cuda.synchronize()
    for began, ended in pairs:
        began.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in pairs)


def _on_the_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began)


def waits_for_the_device(run: Callable[[], object]) -> str | None:
    """What makes the host wait in a run on CUDA, or None."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (milliseconds(device, lambda: target.copy_(source)) / 1000)


# ---- running the parts


def run(options: Options) -> dict[str, Any]:
    """By part. Raises ConfigError: there is no GPU, or no part has such a name."""
    parts = {name: of for name, of in plan(options.tiny).items() if name.startswith(options.only)}
    if not parts:
        raise ConfigError("only", options.only, "no part; --dry-run prints them")
    if options.dry_run:
        return {"parts": {name: {"floor_bytes": of.floors or {}} for name, of in parts.items()}}
    if not options.tiny and not torch.cuda.is_available():
        raise ConfigError(
            "tiny", False, "torch finds no GPU; --tiny tries the command on a CPU, and --dry-run "
            "prints the parts",
        )  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = False
    done = {}
    for name, part in parts.items():
        done[name] = _run(part)
        print(json.dumps({name: done[name]}), file=sys.stderr, flush=True)
    _compare_with_floors(done)
    failed = {name: found["failed"] for name, found in done.items() if "failed" in found}
    return {"parts": done, "failed": failed}


def _run(part: Part) -> dict[str, Any]:
    try:
        with torch.no_grad():
            result = part.run()
    # GPUs are lent for minutes: one failed part must not cost the others.
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {error}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def _compare_with_floors(done: dict[str, dict[str, Any]]) -> None:
    """Add `graph_over_floor`: the time of a graph over that of the fewest bytes at the bandwidth
    of a copy."""
    bandwidth = done.get("bandwidth", {}).get("bytes_per_s")
    for found in done.values():
        for phase in (found[name] for name in PHASES if name in found):
            if bandwidth and "graph_ms" in phase:
                floor_ms = 1000 * phase["floor_bytes"] / bandwidth
                phase["graph_over_floor"] = round(phase["graph_ms"] / floor_ms, 3)


def table(result: dict[str, Any]) -> list[str]:
    columns = ("floor_bytes", "eager_ms", "graph_ms", "graph_over_floor")
    lines = [f"{'':50}" + "".join(f"{column:>18}" for column in columns)]
    for name, found in result["parts"].items():
        shown = {phase: found[phase] for phase in PHASES if phase in found}
        for phase, of in shown.items():
            cells = "".join(f"{of.get(column, ''):>18}" for column in columns)
            lines.append(f"{name.removeprefix('phases/') + ' ' + phase:50}{cells}")
        lines.append(f"{name}: { {key: of for key, of in found.items() if key not in shown} }")
    return lines


def failure(result: dict[str, Any]) -> str | None:
    return f"failed: {', '.join(result['failed'])}" if result.get("failed") else None
