"""Torch code in place of our own slowest Triton kernels, which compute one token per program: on
request, for servers that compare something else than kernels.

Each is launched with the arguments of the function of dflash_kernels that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting import ops
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable, fill_context_table
from sglang_dflash.drafting.kv import Tags
from sglang_dflash.drafting.kv.place import place_in_ring
from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.drafting.rope import Rotary
from tests.fake_gpu.launches import kernel

OPS = ops.TorchOps()


def rotary_of(frequencies: Tensor, factor: float) -> Any:
    """A `Rotary` of tensors of the host."""
    rotary = SimpleNamespace(frequencies=frequencies, attention_factor=factor)
    rotary.cos_sin = lambda positions, dtype: Rotary.cos_sin(rotary, positions, dtype)
    return rotary


def add_rms_norm(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    store_sum: bool = True,
) -> None:
    normed, total = OPS.add_rms_norm(x, residual, weight, eps, bias)
    out.copy_(normed)
    if residual is not None and store_sum:
        residual.copy_(total)


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    frequencies: Tensor,
    factor: float,
    heads: int,
    eps: float,
) -> None:
    rotation = rotary_of(frequencies, factor).cos_sin(positions, torch.float32)
    weights = q_weight.float(), k_weight.float()
    q, k, _ = OPS.qk_norm_rope(qkv.float(), *weights, rotation, heads, eps)
    both = torch.cat((q, k), -2).flatten(-2)
    qkv[:, : both.shape[-1]] = both.to(qkv.dtype)


def silu_mul(out: Tensor, x: Tensor) -> None:
    out.copy_(OPS.silu_mul(x))


def write_context(
    cache: Tensor,
    kv: Tensor,
    entries: Tensor,
    positions: Tensor,
    k_weights: Tensor,
    frequencies: Tensor,
    factor: float,
    eps: float,
) -> None:
    rotary = rotary_of(frequencies, factor)
    OPS.write_context(cache, kv, entries, positions, k_weights, rotary, eps)


def candidates(values: Tensor, columns: Tensor, logits: Tensor) -> None:
    found = OPS.candidates(logits, values.shape[1])
    for to, result in zip((values, columns), found, strict=True):
        to.copy_(result)


def walk(out: Tensor, scores: Tensor | None, *given: Any) -> None:
    tokens, found = OPS.walk(*given)
    out.copy_(tokens)
    if scores is not None and found is not None:
        scores.copy_(found)


def sample_whole(out: Tensor, logits: Tensor, noise: Any, proposal: Any) -> None:
    out.copy_(OPS.sample(logits, noise, None, proposal))


def sample_filtered(out: Tensor, logits: Tensor, noise: Any, filters: Any, proposal: Any) -> None:
    out.copy_(OPS.sample(logits, noise, filters, proposal))


def block_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    old: Tensor,
    entries: Tensor,
    seq_lens: Tensor,
    layer: Any,
    workspace: Any = None,
    each: int = 1,
) -> None:
    attention = TorchAttention([layer], q.shape[1])
    attention.prepare(old.unsqueeze(1), ContextTable(entries, seq_lens))
    out.copy_(attention.attend(0, q, k, v))


def fold_(layers: dict[str, Any], states: Tensor, kept: Any, moves: Any) -> None:
    replay.fold_(replay.RecurrentLayers(**layers), states, kept, moves)


def launch_fold(layers: Any, states: Tensor, kept: Any, moves: Any) -> None:
    kernel(fold_)(vars(layers), states, kept, moves)


def with_frequencies(run: Callable[..., None], at: int) -> Callable[..., None]:
    """Launch with the rotary's frequencies and factor in its place, argument number `at`."""
    launch = kernel(run)

    def launch_with(*args: Any) -> None:
        rotary = args[at]
        own = rotary.frequencies, rotary.attention_factor
        launch(*args[:at], *own, *args[at + 1 :])

    return launch_with


def launch_place(
    tags: Tags,
    cursor: Tensor,
    target_slots: Tensor,
    live: Tensor | None = None,
    fair_share: int | None = None,
) -> Tensor:
    out = torch.empty_like(target_slots)

    def place(out: Tensor, *inputs: Any) -> None:
        out.copy_(place_in_ring(*inputs))

    kernel(place)(out, tags, cursor, target_slots, live, fair_share)
    return out


# Of dflash_kernels.draft_ops, .draft_attention and .gated_delta_fold.
OF_OPS: dict[str, Callable[..., None]] = {
    "context_table": kernel(fill_context_table),
    "place_in_ring": launch_place,
    "add_rms_norm": kernel(add_rms_norm),
    "qk_norm_rope": with_frequencies(qk_norm_rope, 4),
    "silu_mul": kernel(silu_mul),
    "write_context": with_frequencies(write_context, 5),
    "penalize": kernel(OPS.penalize),
    "walk": kernel(walk),
    "sample_whole": kernel(sample_whole),
    "candidates": kernel(candidates),
    "sample_filtered": kernel(sample_filtered),
}
OF_ATTENTION: dict[str, Callable[..., None]] = {"block_attention": kernel(block_attention)}
OF_REPLAY: dict[str, Callable[..., None]] = {"fold_": launch_fold}
