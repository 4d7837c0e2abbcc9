"""Bytes that the draft side of a step moves on a GPU, compared with the fewest possible.

Drafts of published shapes in bfloat16, on one rank of a GPU with 132 multiprocessors, with Triton's
operations and attention. It runs on fake tensors, so on any machine. The bytes of a torch operation
are what it reads and writes, those of our kernels come from the formula beside each. `absorb`
projects the hidden states of all block positions; `commit` accepts drafts and finds entries for
their tokens; `lookup` finds drafts in the requests' own texts, chooses between them and the
draft's, and learns from the outcome.

The floor counts once: every weight, lm_head, the visible K/V of every layer, the input and output
of every matrix product, and a write and a read of the logits; for a DFlash2 draft also the base
kernels, and the rows of the selector's tables that a walk reads. Operations between two products,
such as a norm, are free: they could be fused into one of them.

For kernels that read the whole vocabulary, instructions are counted too, as compiled for an H100
(tests/kernels/registers.json). `busy` is the larger of a launch's bytes and of the bytes that the
GPU could move while it issues the launch's instructions without a stall: `propose_busy` if all
requests are greedy, `sampled_busy` if all are sampled.

The exit status is 1 if a row of `propose` or `absorb` is above its goal or its entry in `SHORT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from dflash_kernels.draft_attention import TritonAttention
from dflash_kernels.draft_ops import TritonOps
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.kernel_traffic import StepContents
from experiments.launches import Launch, bytes_of, record_launches
from experiments.runner import NoOptions as Options
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention.backend import AttentionSizes
from sglang_dflash.drafting.attention.capabilities import AttentionLoad
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.lookup import Lookup
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, likeliest
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
    # These show how a step grows with the context.
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
# Accepted ratios above the goal: (draft, requests, part) -> ratio. docs/gpu.md has the reasons.
SHORT = {
    ("z-lab/Qwen3.8-27B-DFlash2", 48, "propose"): 1.092,
    ("z-lab/Qwen3.8-27B-DFlash2", 64, "propose"): 1.107,
    ("z-lab/Qwen3-8B-DFlash-b16", 32, "propose"): 1.082,
    ("z-lab/Qwen3-8B-DFlash-b16", 64, "propose"): 1.108,
    ("z-lab/Qwen3.5-27B-DFlash", 64, "propose"): 1.106,
    ("z-lab/Qwen3.5-35B-A3B-DFlash", 64, "propose"): 1.085,
    ("z-lab/Qwen3.5-35B-A3B-DFlash", 64, "absorb"): 1.201,
}


class DraftLoad(NamedTuple):
    """A draft under a load."""

    shape: str
    requests: int
    context: int
    window: int | None


class Unfused(TritonOps):
    """Triton's operations, but torch's for those that DFlash2 added."""

    convolve, candidates, walk = TorchOps.convolve, TorchOps.candidates, TorchOps.walk


# Launches of each part of a step. Three parts are proposals: "propose", as it is recorded, for
# sampled and greedy requests; "greedy", without noise; "unfused", as recorded, with `Unfused`.
Step = dict[str, list[Launch]]


def measure(row: DraftLoad) -> Step:
    """Return the launches of one step, on fake CUDA tensors."""
    config, device = config_of(row.shape), torch.device("cuda")
    options = DraftOptions(window=row.window).resolve(config)
    scene = StepContents([row.context] * row.requests, row.requests * options.verify_block)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # In inference mode, torch would not dispatch the parts of composite operations.
        with FakeTensorMode(), torch.no_grad(), device:
            return _step(row, config, options, scene)
    finally:
        torch.set_default_dtype(before)


def _drafter(
    row: DraftLoad, config: DraftConfig, options: ResolvedOptions, ops: TritonOps
) -> Drafter:
    device, block, requests = torch.device("cuda"), options.draft_block, row.requests
    model = DraftModel(config, ops=ops).freeze()
    slots = row.requests * (row.context + options.verify_block)
    groups = []
    for layer_group in config.groups(options.reach):
        entries = options.ring_entries(layer_group.reach, requests)
        shape = layer_group.kv_shape(config.kv_shape)
        cache: DraftKVCache = DraftKVCache(slots, shape, torch.bfloat16, device)
        if entries is not None:
            cache = RingKVCache(
                entries, slots, shape, torch.bfloat16, device, place=ops.place_in_ring
            )
        load = AttentionLoad(config, block, requests, row.context, PROCESSORS)
        attention = TritonAttention(AttentionSizes(load, device, layer_group.attentions))
        groups.append(KVGroup(layer_group, cache, attention))
    vocabulary = torch.empty(config.vocab_size, config.hidden_size)
    head = TargetHead(lambda ids: vocabulary[ids], lambda hidden: hidden @ vocabulary.T)
    return Drafter(model, head, groups, options)


def _step(
    row: DraftLoad, config: DraftConfig, options: ResolvedOptions, scene: StepContents
) -> Step:
    block, requests = options.verify_block, row.requests
    drafter, unfused = (_drafter(row, config, options, ops) for ops in (TritonOps(), Unfused()))
    model, groups = drafter.model, drafter.groups
    lengths = torch.empty(requests, dtype=torch.int64)
    table = torch.empty(requests, row.context + block, dtype=torch.int32)
    request_slots = RequestSlots(table, torch.empty_like(lengths), lengths, row.context)
    noise = BlockNoise(torch.empty_like(lengths), torch.empty(requests).float(), lengths)
    with record_launches(scene) as greedy:
        drafter.propose(torch.empty_like(lengths), request_slots, None)
    with record_launches(scene) as by_torch:
        unfused.propose(torch.empty_like(lengths), request_slots, noise)
    with record_launches(scene) as propose:
        ids = likeliest(drafter.propose(torch.empty_like(lengths), request_slots, noise))
    tokens = ids.numel()
    hidden = torch.empty(tokens, config.target_hidden_width)
    targets, flat = torch.empty_like(ids), torch.empty(tokens, dtype=torch.int64)
    with record_launches(scene) as commit:
        accepted = model.ops.accept(ids, targets)
        committed = torch.arange(block) < accepted.lengths[:, None]
        entries = [group.cache.place(flat, committed.flatten()) for group in groups]
    texts = Lookup(table, model.ops, block, config.vocab_size, drafter.counters)
    with record_launches(scene) as lookup:
        filled, _ = texts.fill(ids, ids, request_slots, block)
        texts.write(request_slots.rows[:, None], flat.view(ids.shape), filled)
        texts.learn(accepted)
    with record_launches(scene) as absorb:
        drafter.store(hidden, flat, committed.flatten(), entries)
    return {
        "propose": propose, "absorb": absorb, "commit": commit, "greedy": greedy,
        "unfused": by_torch, "lookup": lookup,
    }  # fmt: skip


def figures(row: DraftLoad) -> dict[str, Any]:
    """Return a row of the result."""
    result: dict[str, Any] = row._asdict()
    least_bytes = floors(config_of(row.shape), row.requests, row.context, row.window)
    for part, launches in measure(row).items():
        result[f"{part}_bytes"], result[f"{part}_launches"] = bytes_of(launches), len(launches)
        if part in least_bytes:
            result[f"{part}_floor"] = least_bytes[part]
            result[f"{part}_ratio"] = round(bytes_of(launches) / least_bytes[part], 3)
        if part == "propose":
            for sampling, at in (("propose", 0), ("sampled", 1)):
                result[f"{sampling}_busy"] = round(busy(launches, at) / least_bytes[part], 3)
    return result


def busy(launches: Sequence[Launch], at: int) -> float:
    """Return the bytes that the GPU could move while it runs the launches. `at`: 0 for the fewest
    instructions, 1 for the most."""
    return sum(
        max(sum(launch.traffic), launch.instructions[at] / INSTRUCTIONS_PER_BYTE)
        for launch in launches
    )


def run(options: Options) -> dict[str, Any]:
    rows = [DraftLoad(shape, *load) for shape in SHAPES for load in LOADS]
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
        moved, floor = (row[f"propose_{quantity}"] / 2**30 for quantity in ("bytes", "floor"))
        lines.append(
            f"{row['shape'].removeprefix('z-lab/'):30}{load:>28}  {moved:8.2f} / {floor:6.2f}"
            f"{row['propose_ratio']:8.3f}{row['propose_busy']:7.3f}{row['sampled_busy']:7.3f}"
            f"{row['propose_launches']:6d} ({row['unfused_launches']})"
            f"{row['greedy_bytes'] / row['propose_floor']:8.3f}{row['greedy_launches']:6d}      "
            f"{row['absorb_ratio']:6.3f}{row['commit_ratio']:8.1f}{row['lookup_bytes'] / 1024:9.0f}"
        )
    return lines


def allowed(shape: str, requests: int, part: str) -> float:
    """Return the largest ratio to the floor that is allowed for a part of a step."""
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
