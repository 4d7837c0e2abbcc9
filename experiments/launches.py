"""Kernels that replay adds to a verify step of a hybrid target, counted without a GPU.

Runs on fake tensors on the device "cuda", for Qwen3.5-27B's recurrent layers on one rank; nothing
is computed. The traffic of a torch operation is what it reads and writes, that of a Triton kernel
of `dflash_kernels` is the result of its `traffic` formula. `traffic.py` counts the draft side of a
step in the same way.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from dflash_kernels import (
    accept,
    add_rms_norm,
    block_attention,
    candidates,
    context_table,
    convolve,
    draft_source,
    gated_delta_fold,
    penalize,
    place,
    prepare_block,
    qk_norm_rope,
    sample_filtered,
    sample_whole,
    silu_mul,
    text_match,
    walk,
)
from dflash_kernels.traffic import Traffic
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from experiments.runner import NoOptions as Options
from sglang_dflash.checkpoint.draft_config import LayerAttention, Reach
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.drafting.attention.capabilities import Splits
from sglang_dflash.drafting.recurrent.replay import RecurrentLayers, VerifyInputs

REGISTERS = Path(__file__).parents[1] / "tests/kernels/registers.json"
# The compute capability of an H100.
INSTRUCTION_SET = "90"
TARGET, BLOCK = "Qwen/Qwen3.5-27B", 16
REQUESTS = (1, 8, 29)


class Launch(NamedTuple):
    """One kernel on the GPU.

    Attributes:
        instructions: least and most number that its threads execute, if it reads the logits of the
            whole vocabulary; (0, 0) for other kernels.
    """

    name: str
    traffic: Traffic
    instructions: tuple[float, float] = (0, 0)


@dataclass(frozen=True)
class StepContents:
    """Contents of a step's tensors that decide how much is moved.

    Attributes:
        lengths: committed tokens of each request.
        stored: number of tokens whose context K/V is stored.
    """

    lengths: Sequence[int]
    stored: int = 0


@contextlib.contextmanager
def record_launches(scene: StepContents) -> Iterator[list[Launch]]:
    """Record the launches within this context."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        del grid
        return lambda *args, **kwargs: launches.append(_of_kernel(kernel, scene, args, kwargs))

    with mock.patch.object(KernelInterface, "__getitem__", launcher), _DraftOps(launches):
        yield launches


def bytes_of(launches: Iterable[Launch]) -> int:
    return sum(sum(launch.traffic) for launch in launches)


# ---- kernels of ours


def _of_kernel(
    kernel: Any, scene: StepContents, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launch:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    name = kernel.__name__
    return Launch(name, KERNELS[name](scene, args, kwargs), _instructions(name, args, kwargs))


def _instructions(name: str, args: Any, kwargs: Any) -> tuple[float, float]:
    if name not in READS_LOGITS:
        return 0, 0
    case, at = READS_LOGITS[name]
    used = json.loads(REGISTERS.read_text())[case.format(**kwargs)][INSTRUCTION_SET]
    return used["at_least"] * args[at].numel(), used["at_most"] * args[at].numel()


def _context_table(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    limit, sinks = args[11:13]
    reach = Reach(limit - sinks, sinks)
    return context_table.traffic(args[0].shape[1], scene.lengths, reach, kwargs["HAS_TAGS"])


def _block_attention(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """Return the traffic of the splits and of their merge."""
    q, _, _, old, _, entries = args[:6]
    kv_heads, limit, sinks = old.shape[1], args[-1], kwargs["SINKS"]
    reach, each = Reach(limit - sinks, sinks), args[-2]
    splits = Splits(each, args[9].shape[2] if kwargs["IS_SPLIT"] else 1)
    return block_attention.traffic(
        tuple(q.shape), kv_heads, entries.shape[1], scene.lengths,
        LayerAttention(kwargs["WINDOW"] or None, kwargs["CAUSAL"], reach),
        splits, q.element_size(), old.element_size(),
    )  # fmt: skip


def _add_rms_norm(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    _, x, residual, bias = args[:4]
    summands = {"residual": residual is not None, "bias": bias is not None}
    return add_rms_norm.traffic(
        *x.shape, x.element_size(), **summands, store_sum=kwargs["STORE_SUM"]
    )


def _qk_norm_rope(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    heads = kwargs["H"], kwargs["G"], kwargs["D"]
    return qk_norm_rope.traffic(len(args[0]), *heads, args[0].element_size())


def _write_context(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    cache, kv = args[:2]
    count, depth, _, kv_heads, head_dim = kv.shape
    return qk_norm_rope.write_context_traffic(
        count, scene.stored, depth, kv_heads, head_dim, kv.element_size(), cache.element_size()
    )


def _fold(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """With a checkpoint of every request, if there may be any."""
    states, *inputs = args[:5]
    weight, bias, a_log, dt_bias = args[11:15]
    sizes = (kwargs[name] for name in ("H", "HV", "K", "V"))
    layers = RecurrentLayers(weight, bias, "silu", a_log, dt_bias, *sizes)
    checkpoints = None if args[9] is None else len(args[5])
    accepted = [scene.stored] * len(args[5])
    return gated_delta_fold.traffic(layers, states, VerifyInputs(*inputs), accepted, checkpoints)


def _move_windows(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    pool, rows, checkpoints = args[0], len(args[2]), args[5]
    return gated_delta_fold.window_traffic(pool, rows, None if checkpoints is None else rows)


def _convolve(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    x, bias = args[1:3]
    requests, block, width = x.shape
    size, has_bias = x.element_size(), bias is not None
    return convolve.traffic(requests, block, width, kwargs["K"], args[9], size, has_bias)


def _largest_of_chunks(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    sums, logits = args[2:4]
    count, width = logits.shape
    return candidates.chunk_traffic(count, width, logits.element_size(), sums is not None)


def _candidates(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    logits = args[3]
    return candidates.traffic(*logits.shape, k=kwargs["K"], itemsize=logits.element_size())


def _walk(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    ids, hidden, seeds = args[3], args[5], args[8]
    size, rank = (0, 0) if hidden is None else (hidden.element_size(), hidden.shape[-1])
    requests, drafts, k = ids.shape
    return walk.traffic(requests, drafts, k, rank, size, noise=seeds is not None)


def _take_match(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """Return the traffic if all tokens that follow a match are in the text."""
    requests, count = args[1].shape
    return text_match.take_traffic(requests, max(scene.lengths), count, in_text=requests * count)


def _penalize(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """Return the traffic if every request has all kinds of penalties that the batch has."""
    logits, block, kinds = args[0], args[1], [args[i] for i in (4, 7, 10, 14)]
    shape = *block.shape, logits.shape[1]
    return penalize.traffic(shape, logits.element_size(), kinds, [sum(kinds)] * len(block))


COUNTED_BEFORE = ("merge_kernel", "merge_samples_kernel", "sample_others_kernel",
                  "rank_entries_kernel", "place_kernel")  # fmt: skip
KERNELS: dict[str, Callable[[StepContents, Any, Any], Traffic]] = {
    "context_table_kernel": _context_table,
    "block_attention_kernel": _block_attention,
    "add_rms_norm_kernel": _add_rms_norm,
    "qk_norm_rope_kernel": _qk_norm_rope,
    "write_context_kernel": _write_context,
    "silu_mul_kernel": lambda _, args, __: silu_mul.traffic(
        len(args[0]), args[0].shape[1], args[0].element_size()
    ),
    "convolve_kernel": _convolve,
    "largest_of_chunks_kernel": _largest_of_chunks,
    "candidates_kernel": _candidates,
    "sample_candidates_kernel": lambda _, args, __: sample_filtered.traffic(args[1], args[19]),
    "walk_kernel": _walk,
    "penalize_kernel": _penalize,
    # Both launches.
    "sample_whole_kernel": lambda _, args, __: sample_whole.traffic(
        args[2].shape[0], args[2].shape[1], args[2].element_size()
    ),
    # The launch before has counted for it.
    **dict.fromkeys(COUNTED_BEFORE, lambda *_: Traffic(0, 0)),
    "fold_kernel": _fold,
    "move_windows_kernel": _move_windows,
    "prepare_block_kernel": lambda _, args, __: prepare_block.traffic(*args[0].shape),
    "find_match_kernel": lambda scene, args, _: text_match.find_traffic(
        scene.lengths, max(scene.lengths)
    ),
    "take_match_kernel": _take_match,
    "choose_source_kernel": lambda _, args, __: draft_source.choose_traffic(
        *args[0].shape, drafted=args[4].shape[1]
    ),
    "learn_source_kernel": lambda _, args, __: draft_source.learn_traffic(*args[2].shape[1:]),
    "accept_kernel": lambda _, args, __: accept.traffic(*args[0].shape),
    # All three launches.
    "count_unused_kernel": lambda _, args, __: place.traffic(*args[5:7]),
}

# Kernels that read logits -> row of the table of compiled kernels, index of the logits argument.
READS_LOGITS = {
    "largest_of_chunks_kernel": ("largest_of_chunks sums={HAS_SUMS}", 3),
    "candidates_kernel": ("candidates 262144 k{K}", 3),
    "sample_whole_kernel": ("sample_whole drawn=False", 2),
    "penalize_kernel": ("penalize", 0),
}


# ---- torch's

# Operations that read as many elements of their first input as they return.
GATHERS = ("index", "index_select", "embedding", "gather")
# Operations that write the elements of their first input that the others name, and do not read it.
SCATTERS = ("index_put_", "index_fill_", "index_copy_", "scatter_")
# Operations that do not read the old values of the tensor that they write.
OVERWRITES = ("copy_", "fill_", "zero_")
NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "unsafe_view")


class _DraftOps(TorchDispatchMode):
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].removeprefix("_")
        if name not in NO_LAUNCH and func.namespace != "prim" and not func.is_view:
            # `out` is only written.
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            inputs = [x for x in tree_leaves((args, read)) if isinstance(x, Tensor)]
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            # torch returns an input itself if there is nothing to do, as in a cast to its dtype.
            if name.endswith("_") or not any(out is x for out in outputs for x in inputs):
                self._launches.append(Launch(name, _of_torch(name, inputs, outputs)))
        return result


def _of_torch(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Traffic:
    if name in SCATTERS:
        named, indices = sum(map(_bytes, inputs[1:])), inputs[1:2]
        if name == "index_put_":
            indices = inputs[1:-1]
        rest = inputs[0][(0,) * len(indices)].numel() if name != "scatter_" else 0
        places = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
        return Traffic(named, places * rest * inputs[0].element_size())
    output_bytes = sum(map(_bytes, outputs))
    if name in GATHERS:
        return Traffic(sum(map(_bytes, inputs[1:])) + output_bytes, output_bytes)
    if name in OVERWRITES:
        return Traffic(sum(map(_bytes, inputs[1:])), output_bytes)
    return Traffic(sum(map(_bytes, inputs)), output_bytes)


def _bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of a tensor. An expanded tensor has fewer than its shape."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * x.element_size()


# ---- replay in a verify step of a hybrid target


def run(options: Options) -> dict[str, Any]:
    geometry = TargetGeometry.from_dict(shipped("target")[TARGET].config or {})
    rows = []
    for requests in REQUESTS:
        with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
            phases = count_replay(geometry, requests)
        rows += [
            {"requests": requests, "phase": name, "launches": len(launches),
             "bytes": bytes_of(launches)}
            for name, launches in phases.items()
        ]  # fmt: skip
    return {"target": TARGET, "recurrent_layers": geometry.recurrent_layers, "rows": rows}


def count_replay(geometry: TargetGeometry, requests: int) -> dict[str, list[Launch]]:
    """Return the launches of replay in a verify forward and its commit, half of each block
    accepted."""
    from sglang_dflash.serving.hybrid.replay_pool import Recording
    from sglang_dflash.serving.hybrid.rollback import Checkpoints, Replay, ReplayOps

    shape = geometry.recurrent
    if shape is None:
        raise ValueError(f"{TARGET}: its recurrent layers have no known shape")
    depth, channels, value_heads = shape.layers, shape.channels, shape.value_heads
    key_heads = (channels - value_heads * shape.value_dim) // (2 * shape.key_dim)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    layers = [
        SimpleNamespace(
            layer_id=i, conv_weights=zeros(channels, shape.window + 1), bias=None,
            activation="silu", A_log=torch.zeros(value_heads), dt_bias=zeros(value_heads),
            num_k_heads=key_heads, num_v_heads=value_heads, head_k_dim=shape.key_dim,
            head_v_dim=shape.value_dim,
        )
        for i in range(depth)
    ]  # fmt: skip
    windows = zeros(depth, requests, channels, BLOCK + shape.window).unfold(3, shape.window, 1)
    cache = SimpleNamespace(
        conv=[zeros(depth, requests + 1, channels, shape.window)],
        temporal=torch.zeros(depth, requests + 1, value_heads, shape.value_dim, shape.key_dim),
        intermediate_conv_window=[windows[:, :, :, 1:].permute(0, 1, 3, 2, 4)],
    )
    pool: Any = SimpleNamespace(
        size=requests,
        mamba_pool=SimpleNamespace(mamba_cache=cache, recording=Recording()),
        mamba2_layer_index=lambda index: index,
    )
    slots = torch.zeros(requests, dtype=torch.int32)
    linear = SimpleNamespace(
        forward_metadata=SimpleNamespace(mamba_cache_indices=slots),
        _translate_mamba_indices=lambda indices: indices,
    )
    runner = SimpleNamespace(
        req_to_token_pool=pool, attn_backend=SimpleNamespace(linear_attn_backend=linear)
    )
    replay = Replay(runner, ReplayOps(gated_delta_fold.fold_, gated_delta_fold.move_windows_))
    gate, lengths = zeros(requests * BLOCK, value_heads), torch.zeros(requests, dtype=torch.int64)
    phases = {}
    # The first pass creates buffers; the second one is counted.
    for _ in range(2):
        with record_launches(StepContents([])) as phases["record"]:
            for layer in layers:
                pool.mamba_pool.recording.record(pool, layer, gate, gate, slots, BLOCK)
        for name, checkpoints in (
            ("commit", None), ("commit, checkpoints", Checkpoints(lengths, lengths)),
        ):  # fmt: skip
            with record_launches(StepContents([], stored=BLOCK // 2)) as phases[name]:
                replay.commit(lengths, checkpoints)
    return phases


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['target']}, {result['recurrent_layers']} recurrent layers"]
    lines.append(f"{'requests':>8}  {'phase':20}{'launches':>9}{'MiB moved':>11}")
    for row in result["rows"]:
        moved = row["bytes"] / 2**20
        lines.append(f"{row['requests']:8}  {row['phase']:20}{row['launches']:9}{moved:11.1f}")
    return lines
