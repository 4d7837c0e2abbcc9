"""What to run first on a GPU: checks, times of the draft side against their floor, servers.

    python -m experiments gpu --dry-run
    python -m experiments gpu --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16

Parts, one after the other: the start-up check at published shapes; bandwidth of a copy; propose,
commit and absorb, eager and from CUDA graphs, against the fewest bytes that they must move; the
Transformers loops; servers with plain decoding, our worker and SGLang's built-in one, with a
simulated acceptance length. Weights are random, but for the demo pair and the servers'. Without
SGLang or a checkpoint the servers are skipped. Finished parts are kept in --state, and a second run
goes on after them. Nothing is fetched but what --target and --draft name. The exit status is 1 if a
part failed; the other parts' figures are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments import gpu_checks, gpu_loops, gpu_phases, gpu_servers
from experiments.device import copy_bandwidth
from experiments.drafters import TINY, Load
from experiments.gpu_state import State
from experiments.runner import Arms, Experiment, Progress, option
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.published import shipped

SHAPES = (
    "z-lab/Qwen3-8B-DFlash-b16",
    "z-lab/Qwen3.5-27B-DFlash",
    "z-lab/Qwen3.5-35B-A3B-DFlash",
)
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
# For --dry-run: about what an H200 copies with, in bytes per second.
ASSUMED_BANDWIDTH = 4e12
PHASE_S, CHECK_S, LOOP_S, SERVER_S = 12, 40, 60, 240


@dataclass(frozen=True)
class Options:
    dry_run: bool = option(False, "print the plan and the floors, and measure nothing")
    device: str = option("cuda", "where to measure; cpu is for trying the command", ("cuda", "cpu"))
    size: str = option("published", "shapes of the drafts", ("published", "tiny"))
    state: str = option("gpu-state.json", "file with the finished parts")
    minutes: float = option(28.0, "no part is begun that is likely to end later")
    target: str = option("", "checkpoint of the servers' target")
    draft: str = option("", "its draft")
    load_format: str = option("auto", "the servers' --load-format; dummy reads the configs only")
    accept: float = option(4.0, "tokens that every verify step of a server commits")
    levels: str = option("1x1024,32x32768", "requests at a time x tokens of their prompts")
    new_tokens: int = option(512, "tokens of an answer")
    flags: str = option("", "flags of all servers")
    draft_flags: str = option("", "flags of the servers that draft")

    def pair(self) -> gpu_servers.Pair:
        """What the servers serve. Raises ConfigError."""
        return gpu_servers.Pair(
            target=self.target,
            draft=self.draft,
            load_format=self.load_format,
            accept=self.accept,
            levels=gpu_servers.levels_of(self.levels),
            new_tokens=self.new_tokens,
            flags=gpu_servers.words(self.flags),
            draft_flags=gpu_servers.words(self.draft_flags),
        )


class Part(NamedTuple):
    """One part: its name, about how long it takes, what it computes of the parts before it, and the
    fewest bytes of its phases if it has any."""

    name: str
    seconds: float
    run: Callable[[dict[str, dict[str, Any]]], dict[str, Any]]
    floors: dict[str, int] | None = None


def configs(size: str) -> dict[str, DraftConfig]:
    """The drafts, by name."""
    if size == "tiny":
        return {"tiny": DraftConfig.from_dict(TINY)}
    found, facts = {}, shipped("draft")
    for name in SHAPES:
        raw = facts[name].config
        if raw is None:
            raise ValueError(f"{name}: its config is not shipped")
        found[name.removeprefix("z-lab/")] = DraftConfig.from_dict(raw)
    return found


def plan(options: Options) -> list[Part]:
    """All parts, in order. Raises ConfigError."""
    device, tiny = torch.device(options.device), options.size == "tiny"
    dtype = torch.float32 if tiny else torch.bfloat16
    return [
        Part("bandwidth", 5, lambda _: {"bytes_per_s": copy_bandwidth(device)}),
        *_checks(configs(options.size), device, dtype, tiny),
        *_phases(configs(options.size), device, dtype, TINY_LOADS if tiny else LOADS),
        *_loops(device, tiny),
        *_servers(options.pair()),
    ]


def _checks(
    drafts: dict[str, DraftConfig], device: torch.device, dtype: torch.dtype, tiny: bool
) -> Iterator[Part]:
    for name, config in drafts.items():
        yield Part(
            f"check/{name}",
            CHECK_S,
            lambda _, config=config: gpu_checks.self_check(config, device, dtype),
        )
    yield Part("demo_draft_against_cpu", 5, lambda _: gpu_checks.against_cpu(device))
    shape = (2, 4, 2, 1, 16) if tiny else (8, 16, 48, 16, 128)
    yield Part("fold", 15, lambda _: gpu_checks.fold(device, *shape))


def _phases(
    drafts: dict[str, DraftConfig],
    device: torch.device,
    dtype: torch.dtype,
    loads: tuple[Load, ...],
) -> Iterator[Part]:
    for name, config in drafts.items():
        for load in loads:

            def run(
                done: dict[str, dict[str, Any]],
                config: DraftConfig = config,
                load: Load = load,
            ) -> dict[str, Any]:
                bandwidth = done["bandwidth"]["bytes_per_s"]
                return gpu_phases.time_load(config, load, device, dtype, bandwidth)

            floors = gpu_phases.floors(config, load, dtype.itemsize)
            yield Part(f"phases/{name}/{load.name}", PHASE_S, run, floors)


def _loops(device: torch.device, tiny: bool) -> Iterator[Part]:
    prompts, tokens = (2, 8) if tiny else (8, 128)
    yield Part("loop", LOOP_S, lambda _: gpu_loops.demo_loop(device, prompts, tokens))
    shapes = gpu_loops.TINY_PAIR if tiny else gpu_loops.LARGE_PAIR
    yield Part(
        "large_pair_loop", LOOP_S, lambda _: gpu_loops.large_pair_loop(device, *shapes, tokens // 2)
    )


def _servers(pair: gpu_servers.Pair) -> Iterator[Part]:
    obstacle = pair.obstacle()
    for arm in gpu_servers.ARMS:
        if obstacle is None:
            yield Part(f"server/{arm}", SERVER_S, lambda _, arm=arm: gpu_servers.serve(pair, arm))
        else:
            yield Part(f"server/{arm}", 0, lambda _: {"skipped": obstacle})


def setup_of(options: Options) -> dict[str, Any]:
    """What the figures depend on."""
    ignored = ("state", "minutes", "dry_run")
    chosen = {name: value for name, value in vars(options).items() if name not in ignored}
    accelerator = torch.cuda.get_device_name() if options.device == "cuda" else None
    return {**chosen, "accelerator": accelerator, "torch": torch.__version__}


def workload(_: Arms, options: Options, progress: Progress) -> dict[str, dict[str, Any]]:
    """By part. Raises ConfigError: there is no such device, or the state is of another run."""
    parts = plan(options)
    if options.dry_run:
        return {part.name: _planned(part) for part in parts}
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device: cuda, but torch finds no GPU; --dry-run prints the plan anywhere, and "
            "--device cpu --size tiny tries the command"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    state, began = State(Path(options.state), setup_of(options)), time.monotonic()
    done: dict[str, dict[str, Any]] = {}
    for i, part in enumerate(parts):
        progress(part.name, i, len(parts))
        left = 60 * options.minutes - (time.monotonic() - began)
        if part.name in state.parts:
            done[part.name] = state.parts[part.name]
        elif part.seconds > left:
            done[part.name] = {"skipped": f"about {part.seconds:g} s, {left:.0f} s are left"}
        else:
            done[part.name] = _run(part, done)
            if not {"failed", "skipped"} & set(done[part.name]):
                state.keep(part.name, done[part.name])
    return done


def _planned(part: Part) -> dict[str, Any]:
    if part.floors is None:
        return {"about_s": part.seconds}
    assumed = {name: round(1000 * n / ASSUMED_BANDWIDTH, 4) for name, n in part.floors.items()}
    return {"about_s": part.seconds, "floor_bytes": part.floors, "floor_ms": assumed}


def _run(part: Part, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    try:
        with torch.no_grad():
            result = part.run(done)
    # GPUs are lent for minutes: one failed part must not cost the others' figures.
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {error}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def report(done: dict[str, dict[str, Any]], options: Options) -> dict[str, Any]:
    if options.dry_run:
        return {"assumed_bytes_per_s": ASSUMED_BANDWIDTH, "plan": done}
    timed = {
        name.removeprefix("phases/"): found
        for name, found in done.items()
        if name.startswith("phases/")
    }
    served = {name.removeprefix("server/"): found for name, found in done.items()
              if name.startswith("server/") and "skipped" not in found
              and "failed" not in found}  # fmt: skip
    return {
        "parts": done,
        "goals": gpu_phases.goals(timed) | {"servers": gpu_servers.ratios(served)},
        "skipped": {name: found["skipped"] for name, found in done.items() if "skipped" in found},
        "failed": {name: found["failed"] for name, found in done.items() if "failed" in found},
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    planned = result.get("plan")
    if planned is not None:
        yield from _plan_table(planned)
        return
    heads = f"{'floor':>10}{'graph':>10}{'eager':>10}{'x floor':>9}"
    yield f"{'phases, milliseconds':44}{'part':>9}{heads}"
    for name, found in result["parts"].items():
        for part in (*gpu_phases.PHASES, "step") if name.startswith("phases/") else ():
            if part in found:
                figures = found[part]
                graph = figures.get("graph_ms", float("nan"))
                ratio = figures.get("graph_over_floor", float("nan"))
                yield (
                    f"{name.removeprefix('phases/'):44}{part:>9}{figures['floor_ms']:10.4f}"
                    f"{graph:10.4f}{figures['eager_ms']:10.4f}{ratio:9.2f}"
                )
    for name, found in result["parts"].items():
        if not name.startswith("phases/") and not {"skipped", "failed"} & set(found):
            yield f"{name}: {found}"
    for kind in ("goals", "skipped", "failed"):
        for name, value in result[kind].items():
            yield f"{kind}: {name}: {value}"


def _plan_table(planned: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'part':44}{'about s':>9}  floor, GiB (ms at {ASSUMED_BANDWIDTH / 1e12:g} TB/s): "
        "propose, commit, absorb"
    )
    for name, found in planned.items():
        floors, times = found.get("floor_bytes", {}), found.get("floor_ms", {})
        shown = ", ".join(
            f"{floors[part] / 2**30:.3f} ({times[part]:.3f})"
            for part in gpu_phases.PHASES
            if part in floors
        )
        yield f"{name:44}{found['about_s']:9.0f}  {shown}"
    total = sum(found["about_s"] for found in planned.values())
    yield f"{'all':44}{total:9.0f}"


def failure(result: dict[str, Any]) -> str | None:
    failed = result.get("failed")
    return f"failed: {', '.join(failed)}" if failed else None


EXPERIMENT = Experiment(
    name="gpu",
    description=__doc__,
    options=Options,
    workload=workload,
    report=report,
    table=table,
    failure=failure,
)
