"""Bytes that the draft side of a step moves on a GPU, against the fewest possible.

Drafts of published shapes in bfloat16, on one rank of a GPU with 132 multiprocessors, with Triton's
operations and attention. Computed on fake tensors, so it runs anywhere: of torch's operations what
they read and write is counted, of ours what the formula beside each kernel says. `absorb` projects
the hidden states of all block positions; `commit` accepts, and finds entries for their tokens;
`lookup` finds drafts in the requests' own texts.

The floor has every weight once; lm_head once; the visible K/V of every layer once; of every matrix
product the input and the output once; the logits written and read once; of a DFlash2 draft also
base kernels, and the rows of the selector's tables that one walk reads. Whatever lies between two
products, such as a norm, is free: it could be part of one of them.

Of kernels that read the whole vocabulary, the instructions are counted too, as compiled for an H100
(tests/kernels/registers.json). `busy` is the larger of a launch's bytes and the bytes that the GPU
could move while it issues them, without a stall; of `propose` for greedy requests, of `sampled` if
all are sampled.

The exit status is 1 if a row of `propose` or `absorb` is above its goal, or above what `SHORT` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from dflash_kernels.draft_attention import TritonAttention
from dflash_kernels.draft_ops import TritonOps
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.launches import Launch, Scene, bytes_of, counted
from experiments.runner import NoOptions as Options
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention.backend import Setting
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter, sanitize
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import LIKELIEST, BlockNoise
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.tools.gpu_check.floors import SHAPES, config_of, floors

# Requests, committed tokens of each, window.
LOADS = (
    (1, 1024, None),
    (8, 4096, None),
    (32, 4096, None),
    (32, 32768, 4096),
    (32, 131072, 4096),
    (48, 32768, None),
    # How a step grows with the context.
    (64, 4096, None),
    (8, 16384, None),
    (8, 131072, None),
    (8, 32768, None),
    (1, 131072, None),
)
PROCESSORS = 132
GOALS = {"propose": 1.08, "absorb": 1.2}
BUSY_GOAL = 1.15
# An H100's processors issue 128 instructions per cycle, of 1.7 GHz, while its memory moves 3.35e12
# bytes per second.
INSTRUCTIONS_PER_BYTE = PROCESSORS * 128 * 1.7e9 / 3.35e12
# Short of the goal: what is moved under that load, for a reason that docs/gpu.md has.
SHORT = {
    ("z-lab/Qwen3.8-27B-DFlash2", 48, "propose"): 1.092,
    ("z-lab/Qwen3.8-27B-DFlash2", 64, "propose"): 1.107,
    ("z-lab/Qwen3-8B-DFlash-b16", 64, "propose"): 1.107,
    ("z-lab/Qwen3.5-27B-DFlash", 64, "propose"): 1.105,
    ("z-lab/Qwen3.5-35B-A3B-DFlash", 64, "propose"): 1.083,
    ("z-lab/Qwen3.5-35B-A3B-DFlash", 64, "absorb"): 1.222,
}


class Row(NamedTuple):
    """A draft under a load."""

    shape: str
    requests: int
    context: int
    window: int | None


class Unfused(TritonOps):
    """The operations that are new with DFlash2, in torch."""

    convolve, candidates, walk = TorchOps.convolve, TorchOps.candidates, TorchOps.walk


# Launches of a step's parts. Three are proposals: "propose" as recorded, for sampled and greedy
# requests; "greedy" without noise; and "unfused" as recorded, but `Unfused`.
Step = dict[str, list[Launch]]


def measure(row: Row) -> Step:
    """The launches of one step, on fake CUDA tensors."""
    config, device = config_of(row.shape), torch.device("cuda")
    options = DraftOptions(window=row.window).resolve(config)
    scene = Scene([row.context] * row.requests, row.requests * options.verify_block)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # In inference mode, torch would not show the operations that others are made of.
        with FakeTensorMode(), torch.no_grad(), device:
            return _step(row, config, options, scene)
    finally:
        torch.set_default_dtype(before)


def _drafter(row: Row, config: DraftConfig, options: ResolvedOptions, ops: TritonOps) -> Drafter:
    device, block, requests = torch.device("cuda"), options.draft_block, row.requests
    model = DraftModel(config, ops=ops).freeze()
    slots = row.requests * (row.context + options.verify_block)
    groups = []
    for layers in config.groups(options.reach):
        entries = options.ring_entries(layers.reach, requests)
        shape = layers.kv_shape(config.kv_shape)
        cache: DraftKVCache = DraftKVCache(slots, shape, torch.bfloat16, device)
        if entries is not None:
            cache = RingKVCache(entries, slots, shape, torch.bfloat16, device)
        setting = Setting(block, device, layers.layers, requests=requests, columns=row.context)
        groups.append(KVGroup(layers, cache, TritonAttention(config, setting, PROCESSORS)))
    vocabulary = torch.empty(config.vocab_size, config.hidden_size)
    head = TargetHead(lambda ids: vocabulary[ids], lambda hidden: hidden @ vocabulary.T)
    return Drafter(model, head, groups, options)


def _step(row: Row, config: DraftConfig, options: ResolvedOptions, scene: Scene) -> Step:
    block, requests = options.verify_block, row.requests
    drafter, unfused = (_drafter(row, config, options, ops) for ops in (TritonOps(), Unfused()))
    model, groups = drafter.model, drafter.groups
    lengths = torch.empty(requests, dtype=torch.int64)
    table = torch.empty(requests, row.context + block, dtype=torch.int32)
    known = RequestSlots(table, torch.empty_like(lengths), lengths, row.context)
    noise = BlockNoise(torch.empty_like(lengths), torch.empty(requests).float(), lengths)
    with counted(scene) as greedy:
        drafter.propose(torch.empty_like(lengths), known, None)
    with counted(scene) as by_torch:
        unfused.propose(torch.empty_like(lengths), known, noise)
    with counted(scene) as propose:
        ids = drafter.propose(torch.empty_like(lengths), known, noise)[LIKELIEST]
    tokens = ids.numel()
    with counted(scene) as lookup:
        model.ops.seen_before(torch.empty_like(lengths), table, known, block - 1)
    hidden = torch.empty(tokens, config.target_hidden_width)
    targets, flat = torch.empty_like(ids), torch.empty(tokens, dtype=torch.int64)
    with counted(scene) as commit:
        accepted = model.ops.accept(ids, targets)
        keep = torch.arange(block) < accepted.lengths[:, None]
        found = [group.cache.place(flat, keep.flatten()) for group in groups]
    with counted(scene) as absorb:
        kv = model.project_context(sanitize(model.context_features(hidden))[0])
        for group, at in zip(groups, found, strict=True):
            group.store(model, kv, flat, at)
    return {
        "propose": propose, "absorb": absorb, "commit": commit, "greedy": greedy,
        "unfused": by_torch, "lookup": lookup,
    }  # fmt: skip


def figures(row: Row) -> dict[str, Any]:
    """A row of the result."""
    result: dict[str, Any] = row._asdict()
    least = floors(config_of(row.shape), row.requests, row.context, row.window)
    for part, launches in measure(row).items():
        result[f"{part}_bytes"], result[f"{part}_launches"] = bytes_of(launches), len(launches)
        if part in least:
            result[f"{part}_floor"] = least[part]
            result[f"{part}_ratio"] = round(bytes_of(launches) / least[part], 3)
        if part == "propose":
            for kind, at in (("propose", 0), ("sampled", 1)):
                result[f"{kind}_busy"] = round(busy(launches, at) / least[part], 3)
    return result


def busy(launches: Sequence[Launch], at: int) -> float:
    """Bytes that the GPU could move while it runs them. `at`: 0 for the fewest instructions, 1 for
    the most."""
    return sum(
        max(sum(launch.traffic), launch.instructions[at] / INSTRUCTIONS_PER_BYTE)
        for launch in launches
    )


def run(options: Options) -> dict[str, Any]:
    rows = [Row(shape, *load) for shape in SHAPES for load in LOADS]
    return {
        "dtype": "bfloat16",
        "processors": PROCESSORS,
        "goals": GOALS,
        "busy_goal": BUSY_GOAL,
        "rows": [figures(row) for row in rows],
    }


def table(result: dict[str, Any]) -> list[str]:
    names = f"{'draft':30}{'requests x context, window':>28}"
    lines = [
        f"{names}  propose: GiB / floor, ratio, busy, if sampled, launches (unfused); ratio "
        "without noise, launches; ratio of absorb, of commit; KiB of lookup"
    ]
    for row in result["rows"]:
        load = f"{row['requests']} x {row['context']}, {row['window'] or 'none'}"
        moved, floor = (row[f"propose_{of}"] / 2**30 for of in ("bytes", "floor"))
        lines.append(
            f"{row['shape'].removeprefix('z-lab/'):30}{load:>28}  {moved:8.2f} / {floor:6.2f}"
            f"{row['propose_ratio']:8.3f}{row['propose_busy']:7.3f}{row['sampled_busy']:7.3f}"
            f"{row['propose_launches']:6d} ({row['unfused_launches']})"
            f"{row['greedy_bytes'] / row['propose_floor']:8.3f}{row['greedy_launches']:6d}      "
            f"{row['absorb_ratio']:6.3f}{row['commit_ratio']:8.1f}{row['lookup_bytes'] / 1024:9.0f}"
        )
    return lines


def allowed(shape: str, requests: int, part: str) -> float:
    """The ratio to the floor that a part of a step may have."""
    return max(GOALS[part], SHORT.get((shape, requests, part), 0.0))


def failure(result: dict[str, Any]) -> str | None:
    above = [
        f"busy with {row['shape']} at {row['requests']} x {row['context']}: {row['propose_busy']}"
        for row in result["rows"]
        if row["propose_busy"] > BUSY_GOAL
    ]
    above += [
        f"{part} of {row['shape']} at {row['requests']} x {row['context']}: {row[part + '_ratio']}"
        for row in result["rows"]
        for part in GOALS
        if row[f"{part}_ratio"] > allowed(row["shape"], row["requests"], part)
    ]
    return f"above the goal: {'; '.join(above)}" if above else None


# ---- the floor
