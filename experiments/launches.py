"""Kernels that replay adds to a verify step of a hybrid target, counted without a GPU.

Runs on fake tensors on the device "cuda", for Qwen3.5-27B's recurrent layers on one rank; nothing
is computed. The traffic of a torch operation is what it reads and writes, that of a Triton kernel
of `dflash_kernels` is the result of its `traffic` formula. `traffic.py` counts the draft side of a
step in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from dflash_kernels import gated_delta_fold
from dflash_kernels.traffic import Traffic
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from experiments.kernel_traffic import KERNELS, StepContents, instructions_of
from experiments.runner import NoOptions as Options
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.checkpoint.target_config import TargetGeometry

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


def _of_kernel(
    kernel: Any, scene: StepContents, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launch:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    name = kernel.__name__
    return Launch(name, KERNELS[name](scene, args, kwargs), instructions_of(name, args, kwargs))


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
    from sglang_dflash.serving.hybrid.rollback import Checkpoints, Replay

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
    replay = Replay(runner, gated_delta_fold.fold_, gated_delta_fold.move_windows_)
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
