"""Counts what operations would move in a GPU's memory, without a GPU.

For fake tensors on the device "cuda". Of a torch operation, what it reads and writes is counted; of
a Triton kernel of `dflash_kernels`, what the formula beside it says. Nothing is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from dflash_kernels import (
    accept,
    add_rms_norm,
    block_attention,
    prepare_block,
    qk_norm_rope,
    silu_mul,
    slot_table,
)
from dflash_kernels.traffic import Traffic
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from sglang_dflash.facts.draft_config import LayerAttention, Reach


class Launch(NamedTuple):
    """One kernel on the GPU."""

    name: str
    traffic: Traffic


@dataclass(frozen=True)
class Scene:
    """What the tensors of a step hold, as far as it decides what is moved.

    Attributes:
        lengths: committed tokens of the requests.
        kept: tokens whose context K/V is stored.
    """

    lengths: Sequence[int]
    kept: int = 0


@dataclass
class Launches:
    """The launches so far."""

    all: list[Launch] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(sum(launch.traffic) for launch in self.all)

    def __len__(self) -> int:
        return len(self.all)


@contextlib.contextmanager
def counted(scene: Scene) -> Iterator[Launches]:
    """Count the launches of what runs inside."""
    found = Launches()

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        del grid
        return lambda *args, **kwargs: found.all.append(_of_kernel(kernel, scene, args, kwargs))

    with mock.patch.object(KernelInterface, "__getitem__", launcher), _DraftOps(found):
        yield found


# ---- kernels of ours


def _of_kernel(kernel: Any, scene: Scene, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    name = kernel.__name__
    return Launch(name, KERNELS[name](scene, args, kwargs))


def _slot_table(scene: Scene, args: Any, kwargs: Any) -> Traffic:
    limit, sinks = args[11:13]
    reach = Reach(limit - sinks, sinks)
    return slot_table.traffic(args[0].shape[1], scene.lengths, reach, kwargs["RING"])


def _block_attention(scene: Scene, args: Any, kwargs: Any) -> Traffic:
    """Of the splits and of their merge."""
    q, _, _, old, _, entries = args[:6]
    kv_heads, limit, sinks = old.shape[1], args[-1], kwargs["SINKS"]
    reach = Reach(limit - sinks, sinks)
    return block_attention.traffic(
        tuple(q.shape), kv_heads, entries.shape[1], scene.lengths,
        LayerAttention(kwargs["WINDOW"] or None, kwargs["CAUSAL"], reach),
        kwargs["SPLITS"], q.element_size(), old.element_size(),
    )  # fmt: skip


def _add_rms_norm(scene: Scene, args: Any, kwargs: Any) -> Traffic:
    _, x, residual, bias = args[:4]
    return add_rms_norm.traffic(
        *x.shape,
        x.element_size(),
        residual=residual is not None,
        bias=bias is not None,
        store_sum=kwargs["STORE_SUM"],
    )


def _qk_norm_rope(scene: Scene, args: Any, kwargs: Any) -> Traffic:
    heads = kwargs["H"], kwargs["G"], kwargs["D"]
    return qk_norm_rope.traffic(len(args[0]), *heads, args[0].element_size())


def _write_context(scene: Scene, args: Any, kwargs: Any) -> Traffic:
    cache, kv = args[:2]
    count, depth, _, kv_heads, head_dim = kv.shape
    return qk_norm_rope.write_context_traffic(
        count, scene.kept, depth, kv_heads, head_dim, kv.element_size(), cache.element_size()
    )


def _silu_mul(scene: Scene, args: Any, kwargs: Any) -> Traffic:
    count, width = args[0].shape
    return silu_mul.traffic(count, width, args[0].element_size())


KERNELS: dict[str, Callable[[Scene, Any, Any], Traffic]] = {
    "slot_table_kernel": _slot_table,
    "block_attention_kernel": _block_attention,
    "merge_kernel": lambda *_: Traffic(0, 0),
    "add_rms_norm_kernel": _add_rms_norm,
    "qk_norm_rope_kernel": _qk_norm_rope,
    "write_context_kernel": _write_context,
    "silu_mul_kernel": _silu_mul,
    "prepare_block_kernel": lambda _, args, __: prepare_block.traffic(*args[0].shape),
    "accept_kernel": lambda _, args, __: accept.traffic(*args[0].shape),
}


# ---- torch's

# Of these inputs, as much is read as is returned.
GATHERS = ("index", "index_select", "embedding", "gather")
# Of the first input, as much is written as the others name; it is not read.
SCATTERS = ("index_put_", "index_fill_", "index_copy_", "scatter_")
# The old values of the tensor that is written are not read.
OVERWRITES = ("copy_", "fill_", "zero_")
NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "unsafe_view")


class _DraftOps(TorchDispatchMode):
    def __init__(self, found: Launches) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].removeprefix("_")
        if name not in NO_LAUNCH and func.namespace != "prim" and not func.is_view:
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            # torch returns the same tensor where there is nothing to do, as a cast to its dtype.
            if name.endswith("_") or not any(out is x for out in outputs for x in inputs):
                self._found.all.append(Launch(name, _of_torch(name, inputs, outputs)))
        return result


def _of_torch(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Traffic:
    if name in SCATTERS:
        named = sum(map(_bytes, inputs[1:]))
        places = inputs[1].numel() * inputs[0][0].numel() if name != "scatter_" else 0
        return Traffic(named, places * inputs[0].element_size())
    written = sum(map(_bytes, outputs))
    if name in GATHERS:
        return Traffic(sum(map(_bytes, inputs[1:])) + written, written)
    if name in OVERWRITES:
        return Traffic(sum(map(_bytes, inputs[1:])), written)
    return Traffic(sum(map(_bytes, inputs)), written)


def _bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: an expanded one has fewer than it shows."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * x.element_size()
