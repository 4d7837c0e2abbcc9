"""The plan of a run on a GPU: checks of every kernel, and times of the draft side.

The parts, in order: bandwidth of a copy; the start-up check at published shapes; replay of
recurrent layers compared with torch; single kernels that read logits; recording of CUDA graphs, as
at a server's start; propose (greedy and sampled), commit and absorb, eager and from CUDA graphs,
compared with the fewest bytes that they must move. Weights are random. SGLang is not needed, and
nothing is fetched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.gpu_check.drafters import TINY, BenchLoad
from sglang_dflash.tools.gpu_check.floors import SHAPES, config_of
from sglang_dflash.tools.gpu_check.parts import (
    floors,
    fold,
    phases,
    self_check,
    start,
    time_kernels,
)
from sglang_dflash.tools.gpu_check.timing import copy_bandwidth

LOADS = (
    BenchLoad(1, 4096, None),
    BenchLoad(1, 4096, 4096),
    BenchLoad(1, 131072, 4096),
    BenchLoad(8, 4096, None),
    BenchLoad(64, 4096, None),
    BenchLoad(32, 32768, None),
    BenchLoad(32, 4096, 4096),
    BenchLoad(32, 131072, 4096),
    BenchLoad(256, 1024, None),
)
TINY_LOADS = (BenchLoad(1, 96, None), BenchLoad(3, 200, 64))
# Numbers of requests for single kernels.
BATCHES = (1, 8, 64, 256)


class CheckPart(NamedTuple):
    """A check or a measurement, with the fewest bytes of its phases if it has phases."""

    run: Callable[[], dict[str, Any]]
    floors: dict[str, int] | None = None


def plan(tiny: bool) -> dict[str, CheckPart]:
    """Return all parts by name, in order.

    Args:
        tiny: a tiny draft on the CPU, in place of published shapes on the GPU.
    """
    device = torch.device("cpu" if tiny else "cuda")
    dtype = torch.float32 if tiny else torch.bfloat16
    drafts = {"tiny": DraftConfig.from_dict(TINY)} if tiny else {
        name.removeprefix("z-lab/"): config_of(name) for name in SHAPES
    }  # fmt: skip
    parts = {"bandwidth": CheckPart(lambda: {"bytes_per_s": copy_bandwidth(device)})}
    for name, config in drafts.items():
        parts[f"check/{name}"] = CheckPart(partial(self_check, config, device, dtype))
    shape = (2, 4, 2, 1, 16) if tiny else (8, 16, 48, 16, 128)
    parts["fold"] = CheckPart(partial(fold, device, dtype, *shape))
    for name, config in drafts.items():
        for requests in BATCHES[:2] if tiny else BATCHES:
            run = partial(time_kernels, config, requests, device, dtype)
            parts[f"kernels/{name}/{requests}"] = CheckPart(run)
    for name, config in drafts.items():
        parts[f"start/{name}"] = CheckPart(partial(start, config, device, dtype))
    for name, config in drafts.items():
        for load in TINY_LOADS if tiny else LOADS:
            run = partial(phases, config, load, device, dtype)
            least_bytes = floors(config, load, dtype.itemsize)
            parts[f"phases/{name}/{load.name}"] = CheckPart(run, least_bytes)
    return parts


def select_parts(tiny: bool, only: str) -> dict[str, CheckPart]:
    """Return `bandwidth`, with which times are compared, and the parts whose names begin with
    `only`.

    Raises:
        ConfigError: no part has such a name.
    """
    every = plan(tiny)
    parts = {name: part for name, part in every.items() if name.startswith(only)}
    if not parts:
        groups = sorted({name.partition("/")[0] for name in every})
        raise ConfigError("only", only, f"no part; they begin with {', '.join(groups)}")
    return {"bandwidth": every["bandwidth"]} | parts


def run(parts: Mapping[str, CheckPart]) -> Iterator[dict[str, dict[str, Any]]]:
    """Run the parts. Yields all figures so far after each part, which is also printed to stderr."""
    torch.backends.cuda.matmul.allow_tf32 = False
    done: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        done[name] = _run(part)
        _compare_with_floor(done[name], done["bandwidth"].get("bytes_per_s"))
        print(json.dumps({name: done[name]}), file=sys.stderr, flush=True)
        yield done


def _run(part: CheckPart) -> dict[str, Any]:
    try:
        with torch.no_grad():
            result = part.run()
    # A failed part must not end the others: time on a GPU is scarce.
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {error}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def _compare_with_floor(figures: dict[str, Any], bandwidth: float | None) -> None:
    """Add `graph_over_floor` to each phase: the time from a graph, divided by that of the fewest
    bytes at a copy's bandwidth."""
    for timed in figures.values():
        if bandwidth and isinstance(timed, dict) and "graph_ms" in timed:
            floor_ms = 1000 * timed["floor_bytes"] / bandwidth
            timed["graph_over_floor"] = round(timed["graph_ms"] / floor_ms, 3)
