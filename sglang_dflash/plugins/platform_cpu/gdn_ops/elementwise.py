"""Projections, norm and gates around the recurrence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.recurrent.gated_delta import ACTIVATIONS
from sglang_dflash.plugins.platform_cpu.gdn_ops import refuse


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, ...]:
    """`[T, q k v z]` and `[T, b a]` -> qkv `[T, C]`, z `[T, HV, V]`, b and a `[T, HV]`."""
    size = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    z = mixed_qkvz[:, size:].reshape(-1, num_heads_v, head_v)
    b, a = mixed_ba[:, :num_heads_v], mixed_ba[:, num_heads_v : 2 * num_heads_v]
    return mixed_qkvz[:, :size].contiguous(), z, b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, ...]:
    """Split Qwen3-Next's layout in the same way: q, k, v and z are grouped by key head, and so are
    b and a."""
    values, tokens = num_heads_v // num_heads_qk, len(mixed_qkvz)
    sizes = [head_qk, head_qk, values * head_v, values * head_v]
    q, k, v, z = mixed_qkvz.view(tokens, num_heads_qk, -1).split(sizes, -1)
    b, a = mixed_ba.view(tokens, num_heads_qk, -1).chunk(2, -1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], -1)
    return qkv, z.reshape(tokens, num_heads_v, head_v), b.flatten(1), a.flatten(1)


def gated_norm_forward(
    self: Any,
    x: Tensor,
    g: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor:
    """Qwen3-Next's norm after the recurrence, of x `[..., V]`, multiplied by a gate of g."""
    refuse("FusedRMSNormGated", residual=residual, prenorm=prenorm or None)
    out = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
    return (out * ACTIVATIONS[self.activation](g.float())).to(x.dtype)


def rms_norm_forward(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """The norm after the recurrence, of x `[..., V]`: by groups of channels, and multiplied by a
    gate of z, of as many elements, after the norm or before it."""
    out = x.float()
    gate = None if z is None else ACTIVATIONS[self.activation](z.reshape(x.shape).float())
    if gate is not None and not self.norm_before_gate:
        out = out * gate
    grouped = out.unflatten(-1, (-1, self.group_size or out.shape[-1]))
    out = (grouped * (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)
    out = out * self.weight.float()
    return (out * gate if gate is not None and self.norm_before_gate else out).to(x.dtype)


def fused_sigmoid_mul(
    attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Tensor:
    """attn_output `[T, H * D]` times the sigmoid of a gate of as many elements."""
    refuse("fused_sigmoid_mul", quant=quant or None)
    gated = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(
        attn_output.dtype
    )
    return attn_output.copy_(gated) if inplace else gated


def fused_gate_sigmoid_mul(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor
) -> Tensor:
    """Models with experts: the shared expert's output `[T, hidden]` times a gate per token.

    The gate is the sigmoid of hidden_states times gate_weight `[hidden]`.
    """
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    return (gate * shared_output.float()).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """`fused_gate_sigmoid_mul`, added to the routed experts' output in place."""
    final_hidden_states += fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output)
