"""The plan of a run on a GPU: checks of every kernel, times of the draft side against their floor.

Parts, one after the other: bandwidth of a copy; the start-up check at published shapes; replay of
recurrent layers against torch; kernels that read logits, by themselves; what a start takes; propose
(greedy and sampled), commit and absorb, eager and from CUDA graphs, against the fewest bytes that
they must move. Weights are random. SGLang is not needed, and nothing is fetched.
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
from sglang_dflash.tools.gpu_check.drafters import TINY, Load
from sglang_dflash.tools.gpu_check.floors import SHAPES, config_of
from sglang_dflash.tools.gpu_check.parts import alone, floors, fold, phases, self_check, start
from sglang_dflash.tools.gpu_check.timing import copy_bandwidth

LOADS = (
    Load(1, 4096, None),
    Load(1, 4096, 4096),
    Load(1, 131072, 4096),
    Load(8, 4096, None),
    Load(64, 4096, None),
    Load(32, 32768, None),
    Load(32, 4096, 4096),
    Load(32, 131072, 4096),
    Load(256, 1024, None),
)
TINY_LOADS = (Load(1, 96, None), Load(3, 200, 64))
# Requests of a batch whose logits are read.
BATCHES = (1, 8, 64, 256)


class Part(NamedTuple):
    """A measurement, and the fewest bytes of its phases if it has any."""

    run: Callable[[], dict[str, Any]]
    floors: dict[str, int] | None = None


def plan(tiny: bool) -> dict[str, Part]:
    """All parts by name, in order.

    Args:
        tiny: a tiny draft on the CPU, in place of published shapes on the GPU.
    """
    device = torch.device("cpu" if tiny else "cuda")
    dtype = torch.float32 if tiny else torch.bfloat16
    drafts = {"tiny": DraftConfig.from_dict(TINY)} if tiny else {
        name.removeprefix("z-lab/"): config_of(name) for name in SHAPES
    }  # fmt: skip
    parts = {"bandwidth": Part(lambda: {"bytes_per_s": copy_bandwidth(device)})}
    for name, config in drafts.items():
        parts[f"check/{name}"] = Part(partial(self_check, config, device, dtype))
    shape = (2, 4, 2, 1, 16) if tiny else (8, 16, 48, 16, 128)
    parts["fold"] = Part(partial(fold, device, dtype, *shape))
    for name, config in drafts.items():
        for requests in BATCHES[:2] if tiny else BATCHES:
            run = partial(alone, config, requests, device, dtype)
            parts[f"kernels/{name}/{requests}"] = Part(run)
    for name, config in drafts.items():
        parts[f"start/{name}"] = Part(partial(start, config, device, dtype))
    for name, config in drafts.items():
        for load in TINY_LOADS if tiny else LOADS:
            run = partial(phases, config, load, device, dtype)
            least = floors(config, load, dtype.itemsize)
            parts[f"phases/{name}/{load.name}"] = Part(run, least)
    return parts


def chosen(tiny: bool, only: str) -> dict[str, Part]:
    """The parts whose names begin with `only`, after `bandwidth`, which times are compared with.

    Raises:
        ConfigError: no part has such a name.
    """
    every = plan(tiny)
    parts = {name: part for name, part in every.items() if name.startswith(only)}
    if not parts:
        groups = sorted({name.partition("/")[0] for name in every})
        raise ConfigError("only", only, f"no part; they begin with {', '.join(groups)}")
    return {"bandwidth": every["bandwidth"]} | parts


def run(parts: Mapping[str, Part]) -> Iterator[dict[str, dict[str, Any]]]:
    """The figures of the parts so far, after each part, which is also shown on stderr."""
    torch.backends.cuda.matmul.allow_tf32 = False
    done: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        done[name] = _run(part)
        _compare_with_floor(done[name], done["bandwidth"].get("bytes_per_s"))
        print(json.dumps({name: done[name]}), file=sys.stderr, flush=True)
        yield done


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


def _compare_with_floor(figures: dict[str, Any], bandwidth: float | None) -> None:
    """Add `graph_over_floor` to each phase: the time of a graph over that of the fewest bytes at
    the bandwidth of a copy."""
    for timed in figures.values():
        if bandwidth and isinstance(timed, dict) and "graph_ms" in timed:
            floor_ms = 1000 * timed["floor_bytes"] / bandwidth
            timed["graph_over_floor"] = round(timed["graph_ms"] / floor_ms, 3)
