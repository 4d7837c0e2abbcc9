"""Parts of the experiment `gpu` that time a drafter of random weights against its floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.device import milliseconds, recorder_for, waits_for_the_device
from experiments.drafters import Load, Loaded, bytes_needed, loaded, random_head, random_model
from experiments.floor import absorb_floor, commit_floor, propose_floor
from sglang_dflash.drafting.attention.backend import choose_attention
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.serving.gpu.backends import ATTENTION

REPEATS = 30
PHASES = ("propose", "commit", "absorb")


def floors(config: DraftConfig, load: Load, itemsize: int = 2) -> dict[str, int]:
    """The fewest bytes of each phase, and of the step that they make up."""
    tokens = load.requests * config.block_size
    found = {
        "propose": propose_floor(config, [load.context] * load.requests, load.window, itemsize),
        "commit": commit_floor(load.requests, config.block_size),
        "absorb": absorb_floor(config, tokens, itemsize),
    }
    return found | {"step": sum(found.values())}


def time_load(
    config: DraftConfig,
    load: Load,
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float,
    attention: str | None = None,
) -> dict[str, Any]:
    """Times of the phases and of a whole step under one load.

    Args:
        bandwidth: of the device, bytes per second.
        attention: the backend; None for that of a server without the flag.

    Returns:
        By `propose`, `commit`, `absorb` and `step`: `eager_ms`, `graph_ms` (recorded; on a CPU a
        list of torch operations), `floor_bytes`, `floor_ms` and `graph_over_floor`. A `step` is
        what a server runs, its graph with the copies into static buffers. `host_waits`: what makes
        the host wait for the device in an eager step, or None. `skipped` alone if memory is short.
    """
    needed = bytes_needed(config, load, dtype.itemsize)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    # Logits, activations and graphs take some more.
    if free is not None and 1.1 * needed > free:
        return {"skipped": f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"}
    name = choose_attention(attention, config, device, ATTENTION)
    with torch.no_grad():
        model = random_model(config, device, dtype)
        one = loaded(model, random_head(model), load, name, device)
        waits = waits_for_the_device(_warm(one)) if device.type == "cuda" else None
        times = _times(one, device, ATTENTION[name].capabilities.capturable)
    result: dict[str, Any] = {"attention": name, "host_waits": waits}
    for part, floor in floors(config, load, dtype.itemsize).items():
        floor_ms = 1000 * floor / bandwidth
        figures = dict(times[part], floor_bytes=floor, floor_ms=round(floor_ms, 5))
        if "graph_ms" in figures:
            figures["graph_over_floor"] = round(figures["graph_ms"] / floor_ms, 3)
        result[part] = figures
    return result


def _warm(one: Loaded) -> Any:
    """An eager step that has run before: the first one compiles and allocates."""
    step = one.step(one.drafter)
    step()
    return step


def _times(one: Loaded, device: torch.device, capturable: bool) -> dict[str, dict[str, float]]:
    """Milliseconds, `eager_ms` and, if it can be recorded, `graph_ms`."""
    recorder, found = recorder_for(device), {}
    records = capturable or device.type == "cpu"
    for part, run in one.phases().items():
        # Before the phases that write: these fill a bounded cache.
        figures = {"eager_ms": milliseconds(device, run, REPEATS)}
        if records:
            figures["graph_ms"] = milliseconds(device, recorder.record(run), REPEATS)
        found[part] = figures
    figures = {"eager_ms": milliseconds(device, one.step(one.drafter), REPEATS)}
    if records:
        graphed = one.graphed(recorder_for(device))
        figures["graph_ms"] = milliseconds(device, one.step(graphed), REPEATS)
        if graphed.eager:
            raise RuntimeError(f"{one.load.name}: {graphed.eager} proposals had no recording")
    found["step"] = figures
    return {part: {k: round(v, 5) for k, v in times.items()} for part, times in found.items()}


def goals(timed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the figures say about the goals, by the names of their loads.

    Args:
        timed: "SHAPE/LOAD" -> what `time_load` returned.

    Returns:
        `step_over_floor_at_batch_1` (goal: at most 1.3) by shape and load, and
        `step_at_128k_over_4k` (at most 1.05; window 4096) by shape and requests.
    """
    over_floor, far_over_near = {}, {}
    for name, found in timed.items():
        shape, _, load = name.rpartition("/")
        step = found.get("step", {})
        if "graph_ms" not in step:
            continue
        if load.startswith("1x"):
            over_floor[name] = step["graph_over_floor"]
        near = timed.get(f"{shape}/{load.replace('x131072w', 'x4096w')}", {}).get("step", {})
        if "x131072w" in load and "graph_ms" in near:
            far_over_near[name] = round(step["graph_ms"] / near["graph_ms"], 3)
    return {"step_over_floor_at_batch_1": over_floor, "step_at_128k_over_4k": far_over_near}
