"""The parts of `sglang-dflash check-gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from dflash_kernels import accept, penalize, text_match
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.capabilities import Capabilities, choose_attention
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.groups import clear
from sglang_dflash.drafting.noise import BlockNoise, Proposal, SampleFilters
from sglang_dflash.drafting.penalties import Penalties, Penalty
from sglang_dflash.drafting.recording_check import check_recording
from sglang_dflash.drafting.recurrent.replay import Moves, RecurrentLayers, VerifyInputs
from sglang_dflash.drafting.recurrent.replay import fold_ as torch_fold_
from sglang_dflash.drafting.self_check import check_attention, check_ops
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.tools.gpu_check.drafters import (
    BenchLoad,
    LoadedDraft,
    load_draft,
    random_head,
    random_model,
)
from sglang_dflash.tools.gpu_check.floors import floors as least_bytes
from sglang_dflash.tools.gpu_check.timing import (
    CudaGraphs,
    milliseconds,
    seconds,
    waits_for_the_device,
)

PHASES = ("propose", "sampled", "commit", "absorb", "step")
# Batch sizes that SGLang records for 48 requests, and positions of its request-to-token table for a
# context of 40,960 tokens.
RECORDED, POSITIONS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48), 40_964
# Committed tokens of a request in a lookup.
TEXT = 4096
# The largest error of a replayed state, as a share of its largest value: 16-bit inputs may round in
# another direction.
FOLD_TOLERANCE = 3e-2


def self_check(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Run a server's start-up check for every attention backend.

    Returns:
        `ops`: the operations that were compared; `attention`: backend -> "as torch", or why it does
        not run here; `failed`, if a backend runs and differs or raises.
    """
    model = random_model(config, device, dtype)
    head, attention, failed = random_head(model), {}, []
    ops = check_ops(model, config.block_size, config.block_size)
    for name in ATTENTION:
        try:
            choose_attention(name, config, device.type)
            # The load of the recorded step; the check of attention has shorter requests.
            load = BenchLoad(requests=4, context=256, window=None)
            draft = load_draft(model, head, load, name, device)
        # The backend's package may be missing, or be made for another GPU.
        except (ConfigError, ImportError) as error:
            attention[name] = str(error)
            continue
        try:
            attention[name] = _compare(draft, ATTENTION[name].capabilities, device)
        # A broken backend must not hide the results of the others.
        except Exception as error:
            attention[name] = f"{type(error).__name__}: {error}"
            failed.append(f"{name}: {attention[name]}")
    result: dict[str, Any] = {"ops": ops, "attention": attention}
    return result | {"failed": "; ".join(failed)} if failed else result


def _compare(draft: LoadedDraft, capabilities: Capabilities, device: torch.device) -> str:
    """Compare attention with torch's, and on a GPU a recorded step with an eager one. Raises
    SelfCheckFailed."""
    drafter, table = draft.drafter, draft.requests.req_to_token
    clear(drafter.groups)
    for group in drafter.groups:
        check_attention(drafter.model, drafter.draft_block, group, draft.load.requests)
    if device.type != "cuda" or not capabilities.capturable:
        return "as torch, not recorded"
    graphed = draft.graphed(CudaGraphs(), table.shape[1])
    check_recording(drafter, graphed, table, (draft.load.requests,))
    if graphed.eager or not graphed.replays["propose"]:
        raise RuntimeError("the proposal that was to be compared had no recording")
    return "as torch, recorded as eager"


def fold(
    device: torch.device,
    dtype: torch.dtype,
    requests: int,
    block: int,
    depth: int,
    heads: int,
    dim: int,
) -> dict[str, Any]:
    """Compare the replay of recurrent layers (Gated DeltaNet) with torch's, and time it.

    Half of each block is accepted, and half of the requests have a checkpoint. Snapshots, which are
    timed beside it, write the state after every token of a block and copy the accepted one.

    Args:
        dtype: dtype of the recorded inputs; states are float32.
        depth: number of layers.
        heads: number of key heads; there are three times as many value heads.
        dim: size of a head.

    Returns:
        Error and times; `failed`, if the error is above `FOLD_TOLERANCE` or, on a GPU, replay is
        slower than snapshots.
    """
    if device.type == "cuda":
        from dflash_kernels.gated_delta_fold import fold_
    else:
        fold_ = torch_fold_
    recorded, states = _recorded_verify(device, dtype, requests, block, depth, heads, dim)
    layers, inputs, moves = recorded
    by_kernel, by_torch = states.clone(), states.clone()
    fold_(layers, by_kernel, inputs, moves)
    torch_fold_(layers, by_torch, inputs, moves)
    error = ((by_kernel - by_torch).abs().max() / by_torch.abs().max()).item()
    del by_torch
    kernel_ms = milliseconds(device, lambda: fold_(layers, by_kernel, inputs, moves))
    before = states[:, :requests, None]
    snapshots = before.expand(-1, -1, block, -1, -1, -1).contiguous()
    write_ms = milliseconds(device, lambda: snapshots.copy_(before.expand_as(snapshots)))
    rows, lengths = moves.rows, moves.lengths
    copy_ms = milliseconds(device, lambda: before[:, :, 0].copy_(snapshots[:, rows, lengths - 1]))
    result: dict[str, Any] = {
        "largest_error": round(error, 6),
        "kernel_ms": round(kernel_ms, 4),
        "snapshot_write_ms": round(write_ms, 4),
        "snapshot_copy_ms": round(copy_ms, 4),
    }
    if not error <= FOLD_TOLERANCE:
        result["failed"] = f"it differs from torch by {error:.3g} of the largest value"
    elif device.type == "cuda" and kernel_ms > write_ms + copy_ms:
        result["failed"] = "replay is slower than snapshots"
    return result


def _recorded_verify(
    device: torch.device,
    dtype: torch.dtype,
    requests: int,
    block: int,
    depth: int,
    heads: int,
    dim: int,
) -> tuple[tuple[RecurrentLayers, VerifyInputs, Moves], Tensor]:
    """Return what a verify forward of random layers would record, and states `[L, 2 R, HV, V,
    K]`."""
    value_heads, width = 3 * heads, 4
    channels = 2 * heads * dim + value_heads * dim

    def normal(*size: int) -> Tensor:
        return torch.randn(depth, *size, device=device).to(dtype)

    layers = RecurrentLayers(
        normal(channels, width), None, "silu", normal(value_heads).float(), normal(value_heads),
        heads, value_heads, dim, dim,
    )  # fmt: skip
    gates = normal(2, requests, block, value_heads).transpose(0, 1)
    inputs = VerifyInputs(
        normal(requests, channels, width - 1), normal(requests, block, channels), *gates
    )
    rows = torch.arange(requests, device=device)
    lengths = torch.full((requests,), block // 2, device=device)
    checkpoints = torch.where(rows % 2 == 0, requests + rows, -1)
    moves = Moves(rows, rows, rows, lengths, checkpoints, torch.ones_like(lengths))
    states = normal(2 * requests, value_heads, dim, dim).float()
    return (layers, inputs, moves), states


def time_kernels(
    config: DraftConfig, requests: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Time single operations on a batch's logits. Their fewest bytes are the logits once, or what
    their kernel reads."""
    model = random_model(config, device, dtype)
    ops, vocabulary, block = model.ops, config.vocab_size, config.block_size

    def ints(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, device=device)

    logits = torch.randn(requests * (block - 1), vocabulary, device=device, dtype=dtype)
    lengths = torch.full((requests,), TEXT, device=device)
    noise = BlockNoise(ints(2**62, requests), torch.ones(requests, device=device), lengths)
    # As the models' generation_config.json has them.
    filters = SampleFilters(
        torch.full((requests,), 20, dtype=torch.int32, device=device),
        torch.full((requests,), 0.95, device=device),
        torch.zeros(requests, device=device),
    )
    ids, bonus = ints(vocabulary, requests, block), ints(vocabulary, requests)
    texts = ints(vocabulary, requests + 1, TEXT + block).int()
    candidates = ints(vocabulary, requests, block - 2, model.head.candidates)
    # Most first drafts are rejected.
    drafts = torch.cat((bonus[:, None], candidates[..., 0]), 1)
    drawn = Proposal(drafts, bonus >= 0, candidates, torch.zeros_like(candidates).float())
    by_request = logits.unflatten(0, (requests, -1))
    rows = 1 + torch.arange(requests, device=device)
    request_slots = RequestSlots(texts, rows, lengths, TEXT)
    logits_bytes = logits.numel() * logits.element_size()
    lookup_bytes = sum(text_match.find_traffic([TEXT] * requests, TEXT))
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "sample": (lambda: ops.sample(logits, noise, None), logits_bytes),
        "sample, filtered": (lambda: ops.sample(logits, noise, filters), logits_bytes),
        "sample, drawn": (
            lambda: ops.sample(logits, noise, None, drawn),
            logits_bytes * block // (block - 1),
        ),
        "sample, filtered, drawn": (
            lambda: ops.sample(logits, noise, filters, drawn), logits_bytes
        ),
        "penalties": _presence(ops, by_request, drafts),
        "accept": (lambda: ops.accept(ids, ids), sum(accept.traffic(requests, block))),
        "lookup": (
            lambda: ops.find_match(bonus, texts, request_slots, block - 1), lookup_bytes
        ),
    }  # fmt: skip
    runs |= model.head.timed_ops(logits, ids[:, 0], noise, _kernel_bytes)
    return {name: _time_op(device, run, floor) for name, (run, floor) in runs.items()}


def _presence(ops: Any, logits: Tensor, block: Tensor) -> tuple[Callable[[], object], int]:
    """Return a run of presence penalties, in place, and its fewest bytes.

    Args:
        logits: `[R, W, V]`.
        block: int64 `[R, W]`, which follows no output.
    """
    requests, _, vocabulary = logits.shape
    so_far = torch.zeros(requests, vocabulary, device=logits.device)
    penalties = Penalties(presence=Penalty(so_far, torch.full_like(so_far[:, :1], 1.5)))
    is_given = [penalty is not None for penalty in penalties]
    least = penalize.traffic(logits.shape, logits.element_size(), is_given, [1] * requests)
    return lambda: ops.penalize(logits, block, penalties), sum(least)


def _kernel_bytes(kernel: str, *shape: int, **how: bool) -> int:
    """Return the bytes of a launch, by the `traffic` formula in the kernel's file."""
    return sum(import_module(f"dflash_kernels.{kernel}").traffic(*shape, **how))


def _time_op(
    device: torch.device, run: Callable[[], object], floor: int, recorded: bool = True
) -> dict[str, Any]:
    result = {"floor_bytes": floor, "eager_ms": round(milliseconds(device, run), 5)}
    if device.type == "cuda" and recorded:
        (replay,) = CudaGraphs().record([run])
        result["graph_ms"] = round(milliseconds(device, replay), 5)
    return result


def start(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure the recording of steps for 48 requests, as at a server's start: seconds, before and
    after all kernels are compiled, and the memory of the graphs."""
    name = choose_attention(None, config, device.type)
    model = random_model(config, device, dtype)
    load = BenchLoad(RECORDED[-1], 64, None)
    draft = load_draft(model, random_head(model), load, name, device, POSITIONS)
    if device.type != "cuda":
        return {"first_s": round(seconds(draft.step(draft.drafter)), 4)}
    result: dict[str, Any] = {}
    for which in ("first", "again"):
        torch.cuda.empty_cache()
        free, began = torch.cuda.mem_get_info(device)[0], time.perf_counter()
        graphed = GraphedDrafter(draft.drafter, CudaGraphs(), draft.requests.req_to_token, RECORDED)
        result[f"{which}_s"] = round(time.perf_counter() - began, 2)
        torch.cuda.empty_cache()
        result[f"{which}_mib"] = (free - torch.cuda.mem_get_info(device)[0]) >> 20
        del graphed
    return result


def floors(config: DraftConfig, load: BenchLoad, itemsize: int) -> dict[str, int]:
    """Return the fewest bytes of each phase, and of a whole step."""
    floors_of_phases = least_bytes(config, *load, itemsize)
    return {
        **floors_of_phases,
        "sampled": floors_of_phases["propose"],
        "step": sum(floors_of_phases.values()),
    }


def phases(
    config: DraftConfig, load: BenchLoad, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Time the phases and a whole step under a load, with the default attention of a server.

    Returns:
        For each phase `floor_bytes`, `eager_ms` and, on a GPU, `graph_ms`; a `step`'s includes the
        copies into static buffers. `host_waits`: the reason why the host waits for the GPU in an
        eager step, or None. `first_step_s`: seconds of the first step, with compilation.
    """
    name = choose_attention(None, config, device.type)
    model = random_model(config, device, dtype)
    draft = load_draft(model, random_head(model), load, name, device)
    runs: dict[str, Callable[[], None]] = {**draft.phases(), "step": draft.step(draft.drafter)}
    result: dict[str, Any] = {"attention": name, "host_waits": None}
    result["first_step_s"] = round(seconds(runs["step"]), 2)
    if device.type == "cuda":
        result["host_waits"] = waits_for_the_device(runs["step"])
    recorded, floor_bytes = (
        ATTENTION[name].capabilities.capturable,
        floors(config, load, dtype.itemsize),
    )
    for phase in PHASES:
        result[phase] = _time_op(
            device, runs[phase], floor_bytes[phase], recorded and phase != "step"
        )
    if device.type == "cuda" and recorded:
        replay = _recorded_step(draft)
        result["step"]["graph_ms"] = round(milliseconds(device, replay), 5)
    return result


def _recorded_step(draft: LoadedDraft) -> Callable[[], None]:
    graphed = draft.graphed(CudaGraphs())
    step = draft.step(graphed)
    step()
    if graphed.eager:
        raise RuntimeError(f"{draft.load.name}: the proposal had no recording")
    return step
