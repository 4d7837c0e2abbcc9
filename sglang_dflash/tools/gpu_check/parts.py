"""The parts of `sglang-dflash check-gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from dflash_kernels import accept, lookup
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.backend import choose_attention
from sglang_dflash.drafting.attention.capabilities import Capabilities
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.groups import clear
from sglang_dflash.drafting.noise import BlockNoise
from sglang_dflash.drafting.recurrent.replay import Moves, RecurrentLayers, VerifyInputs
from sglang_dflash.drafting.recurrent.replay import fold_ as torch_fold_
from sglang_dflash.drafting.self_check import check_attention, check_ops, check_recording
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.tools.gpu_check.drafters import Load, Loaded, loaded, random_head, random_model
from sglang_dflash.tools.gpu_check.floors import floors as least_bytes
from sglang_dflash.tools.gpu_check.timing import (
    CudaGraphs,
    milliseconds,
    seconds,
    waits_for_the_device,
)

PHASES = ("propose", "sampled", "commit", "absorb", "step")
# What SGLang records for 48 requests, and its request-to-token table of 40,960 tokens of context.
RECORDED, POSITIONS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48), 40_964
# Committed tokens of a request whose text is looked through.
TEXT = 4096
# Of a replayed state, as a share of the largest value: a convolved input of 16 bits may round the
# other way.
FOLD_TOLERANCE = 3e-2


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
        check_attention(drafter.model, drafter.draft_block, group, one.load.requests)
    if device.type != "cuda" or not can.capturable:
        return "as torch, not recorded"
    graphed = one.graphed(CudaGraphs(), table.shape[1])
    check_recording(drafter, graphed, table, (one.load.requests,))
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
    """Replay of recurrent layers (Gated DeltaNet), half of each block accepted and half of the
    requests with a checkpoint: the kernel's error against torch, and its time beside what
    verification with snapshots does in its place. That writes the state after every token of a
    block, and copies the accepted one.

    Args:
        dtype: of the recorded inputs; states are float32.
        depth: layers.
        heads: key heads; there are three times as many value heads.
        dim: of a head.

    Returns:
        With `failed`, if the error is above `FOLD_TOLERANCE` or, on a GPU, replay is slower.
    """
    if device.type == "cuda":
        from dflash_kernels.gated_delta_fold import fold_
    else:
        fold_ = torch_fold_
    given, states = _replayed(device, dtype, requests, block, depth, heads, dim)
    layers, kept, moves = given
    ours, twins = states.clone(), states.clone()
    fold_(layers, ours, kept, moves)
    torch_fold_(layers, twins, kept, moves)
    error = ((ours - twins).abs().max() / twins.abs().max()).item()
    del twins
    kernel_ms = milliseconds(device, lambda: fold_(layers, ours, kept, moves))
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


def _replayed(
    device: torch.device,
    dtype: torch.dtype,
    requests: int,
    block: int,
    depth: int,
    heads: int,
    dim: int,
) -> tuple[tuple[RecurrentLayers, VerifyInputs, Moves], Tensor]:
    """Return the tensors that a verification records of random layers, and states `[L, 2 R, HV, V,
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
    kept = VerifyInputs(
        normal(requests, channels, width - 1), normal(requests, block, channels), *gates
    )
    rows = torch.arange(requests, device=device)
    lengths = torch.full((requests,), block // 2, device=device)
    checkpoints = torch.where(rows % 2 == 0, requests + rows, -1)
    moves = Moves(rows, rows, rows, lengths, checkpoints, torch.ones_like(lengths))
    states = normal(2 * requests, value_heads, dim, dim).float()
    return (layers, kept, moves), states


def alone(
    config: DraftConfig, requests: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Operations on a batch's logits by themselves, with the fewest bytes of each: the logits once,
    or what its kernel reads."""
    model = random_model(config, device, dtype)
    ops, vocabulary, block = model.ops, config.vocab_size, config.block_size

    def ints(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, device=device)

    logits = torch.randn(requests * (block - 1), vocabulary, device=device, dtype=dtype)
    lengths = torch.full((requests,), TEXT, device=device)
    noise = BlockNoise(ints(2**62, requests), torch.ones(requests, device=device), lengths)
    greedy = noise._replace(temperatures=torch.zeros_like(noise.temperatures))
    ids, bonus = ints(vocabulary, requests, block), ints(vocabulary, requests)
    texts = ints(vocabulary, requests + 1, TEXT + block)
    known = RequestSlots(texts.int(), 1 + torch.arange(requests, device=device), lengths, TEXT)
    once = logits.numel() * logits.element_size()
    found = sum(lookup.find_traffic([TEXT] * requests, TEXT))
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "largest": (lambda: ops.largest(logits, greedy, 0), once),
        "largest, sampled": (lambda: ops.largest(logits, noise, 0), once),
        "accept": (lambda: ops.accept(ids, ids), sum(accept.traffic(requests, block))),
        "lookup": (
            lambda: ops.seen_before(bonus, known.req_to_token, known, block - 1), found
        ),
    }  # fmt: skip
    runs |= model.head.timed_ops(logits, ids[:, 0], noise, _kernel_bytes)
    return {name: _timed(device, run, floor) for name, (run, floor) in runs.items()}


def _kernel_bytes(kernel: str, *shape: int, **how: bool) -> int:
    """Bytes of one launch of a kernel, by the name of its file."""
    return sum(import_module(f"dflash_kernels.{kernel}").traffic(*shape, **how))


def _timed(
    device: torch.device, run: Callable[[], object], floor: int, recorded: bool = True
) -> dict[str, Any]:
    result = {"floor_bytes": floor, "eager_ms": round(milliseconds(device, run), 5)}
    if device.type == "cuda" and recorded:
        (replay,) = CudaGraphs().record([run])
        result["graph_ms"] = round(milliseconds(device, replay), 5)
    return result


def start(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure the recording of the steps of 48 requests, as in a server's start: seconds, with
    kernels that are not compiled yet and then with all of them, and memory of the graphs."""
    name = choose_attention(None, config, device, ATTENTION)
    model = random_model(config, device, dtype)
    load = Load(RECORDED[-1], 64, None)
    one = loaded(model, random_head(model), load, name, device, POSITIONS)
    if device.type != "cuda":
        return {"first_s": round(seconds(one.step(one.drafter)), 4)}
    result: dict[str, Any] = {}
    for which in ("first", "again"):
        torch.cuda.empty_cache()
        free, began = torch.cuda.mem_get_info(device)[0], time.perf_counter()
        graphed = GraphedDrafter(one.drafter, CudaGraphs(), one.known.req_to_token, RECORDED)
        result[f"{which}_s"] = round(time.perf_counter() - began, 2)
        torch.cuda.empty_cache()
        result[f"{which}_mib"] = (free - torch.cuda.mem_get_info(device)[0]) >> 20
        del graphed
    return result


def floors(config: DraftConfig, load: Load, itemsize: int) -> dict[str, int]:
    """The fewest bytes of each phase, and of the step that they make up."""
    found = least_bytes(config, *load, itemsize)
    return {**found, "sampled": found["propose"], "step": sum(found.values())}


def phases(
    config: DraftConfig, load: Load, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Times of the phases and of a whole step under one load, as a server without a flag for
    attention runs it.

    Returns:
        By phase `floor_bytes`, `eager_ms` and, on a GPU, `graph_ms`; that of a `step` includes the
        copies into static buffers. `host_waits`: what makes the host wait for the GPU in an eager
        step, or None. `first_step_s`: it compiles.
    """
    name = choose_attention(None, config, device, ATTENTION)
    model = random_model(config, device, dtype)
    one = loaded(model, random_head(model), load, name, device)
    runs: dict[str, Callable[[], None]] = {**one.phases(), "step": one.step(one.drafter)}
    result: dict[str, Any] = {"attention": name, "host_waits": None}
    result["first_step_s"] = round(seconds(runs["step"]), 2)
    if device.type == "cuda":
        result["host_waits"] = waits_for_the_device(runs["step"])
    recorded, least = ATTENTION[name].capabilities.capturable, floors(config, load, dtype.itemsize)
    for phase in PHASES:
        result[phase] = _timed(device, runs[phase], least[phase], recorded and phase != "step")
    if device.type == "cuda" and recorded:
        replay = _recorded_step(one)
        result["step"]["graph_ms"] = round(milliseconds(device, replay), 5)
    return result


def _recorded_step(one: Loaded) -> Callable[[], None]:
    graphed = one.graphed(CudaGraphs())
    step = one.step(graphed)
    step()
    if graphed.eager:
        raise RuntimeError(f"{one.load.name}: the proposal had no recording")
    return step
