"""FlashInfer's prefill of Gated DeltaNet layers, and SGLang's slowest kernels of hybrid targets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.recurrent import gated_delta as gdn
from tests.fake_gpu.kernels.attention import refuse
from tests.fake_gpu.kernels.elementwise import normed, rotate_
from tests.fake_gpu.launches import kernel


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor,
    bounds: Tensor,
    out: Tensor,
    final: Tensor,
    checkpoints: Tensor | None,
    rows: Tensor | None,
    every: int,
) -> None:
    """Sequences in a row, q, k `[T, H, K]` and v `[T, HV, V]`; g is the decay itself. States are
    `[sequences, HV, V, K]`, and `checkpoints[rows[i] + j]` is the one after `every * (j + 1)`
    tokens of sequence i."""
    q, k = gdn.per_value_head(q, k, v.shape[1], k.shape[-1] ** -0.5, False)
    for i, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        span, state = slice(start, end), initial[i]
        if start < end:
            outputs, state, starts = gdn.chunked(
                q[span], k[span], v[span], g[span].log(), beta[span], state
            )
            out[span] = outputs.to(out.dtype)
        final[i] = state
        if checkpoints is not None and rows is not None and end - start >= every:
            states = torch.cat((starts, state[None]))[every // gdn.CHUNK :: every // gdn.CHUNK]
            first, count = int(rows[i]), (end - start) // every
            checkpoints[first : first + count] = states[:count]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    output: Tensor | None,
    output_state: Tensor,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`flashinfer.gdn_prefill.chunk_gated_delta_rule`, as SGLang calls it."""
    assert scale is None and output_final_state and not use_qk_l2norm_in_kernel
    output = torch.empty_like(v) if output is None else output
    states = initial_state, cu_seqlens, output, output_state
    kept = state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
    kernel(prefill)(q, k, v, g, beta, *states, *kept)
    return output, output_state


def gated_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
    quant_heads: int = 0,
) -> tuple[Tensor, None, None]:
    """SGLang's `_layer_norm_fwd` of rows `[M, N]`, gated by z: RMSNorm only."""
    refuse(
        bias=bias is not None,
        group_size=group_size not in (None, x.shape[1]),
        norm_after_gate=not norm_before_gate,
        layer_norm=not is_rms_norm,
        activation=activation not in ("swish", "silu", "sigmoid"),
        quant_heads=quant_heads,
    )
    y = normed(x.float(), weight, eps)
    if z is not None:
        gate = torch.sigmoid if activation == "sigmoid" else F.silu
        y = y * gate(z.reshape(x.shape).float())
    out = torch.empty_like(x) if out is None else out
    return out.copy_(y), None, None


def qk_norm_rope_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_gate: bool = True,
    mrope_axis_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """SGLang's `fused_qk_gemma_rmsnorm_rope_gate` of one position per token."""
    refuse(mrope=mrope_axis_map is not None)
    heads = q_gate.reshape(len(k), num_q_heads, -1)
    both = heads[..., :head_dim], k.reshape(len(k), num_kv_heads, head_dim)
    results = []
    for x, weight in zip(both, (q_weight, k_weight), strict=True):
        y = normed(x, weight, eps, offset=1.0)
        rotate_(y, cos_sin_cache, positions, True, rotary_dim)
        results.append(y.flatten(1))
    gate = heads[..., head_dim:].contiguous() if has_gate else None
    return results[0], results[1], gate


# Modules of sglang.kernels.ops.attention: their slow functions -> torch code of host tensors.
SLOW: dict[str, dict[str, Callable[..., Any]]] = {
    "fla.layernorm_gated": {"_layer_norm_fwd": gated_norm},
    "fused_qk_rmsnorm_rope_gate": {"fused_qk_gemma_rmsnorm_rope_gate": qk_norm_rope_gate},
}
