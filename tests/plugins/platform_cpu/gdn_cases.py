"""Inputs, poisoned pools and independent references for the Gated DeltaNet tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from sglang_dflash.plugins.platform_cpu.gdn_ops import delta_rule

HEADS, VALUE_HEADS, K, V, WIDTH = 2, 4, 16, 24, 4
CHANNELS = 2 * HEADS * K + VALUE_HEADS * V
SLOTS, BLOCK = 7, 5
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def parameters() -> SimpleNamespace:
    return SimpleNamespace(
        a_log=torch.rand(VALUE_HEADS) * 2 - 1, dt_bias=torch.rand(VALUE_HEADS) - 0.5
    )


def inputs(tokens: int) -> SimpleNamespace:
    """Inputs of a layer's recurrence.

    a and b are spread so that a memory lasts from one to hundreds of tokens.
    """
    return SimpleNamespace(
        q=torch.randn(tokens, HEADS, K), k=torch.randn(tokens, HEADS, K),
        v=torch.randn(tokens, VALUE_HEADS, V),
        a=torch.randn(tokens, VALUE_HEADS) * 3 - 3, b=torch.randn(tokens, VALUE_HEADS),
    )  # fmt: skip


def loop(x: SimpleNamespace, p: SimpleNamespace, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: outputs `[T, HV, V]` and states `[T + 1, HV, V, K]`, in float64.

    The states are those before the first and after every token.
    """
    state, states, out = state.double(), [state.double()], []
    for t in range(len(x.v)):
        after, outputs = torch.empty_like(state), torch.empty(VALUE_HEADS, V, dtype=torch.float64)
        for h in range(VALUE_HEADS):
            q, k = (y[t, h // (VALUE_HEADS // HEADS)].double() for y in (x.q, x.k))
            q, k = q / (q @ q + 1e-6).sqrt() / K**0.5, k / (k @ k + 1e-6).sqrt()
            decay = torch.exp(
                -p.a_log[h].double().exp()
                * torch.log1p((x.a[t, h].double() + p.dt_bias[h].double()).exp())
            )
            before = state[h] * decay
            after[h] = before + torch.outer(
                torch.sigmoid(x.b[t, h].double()) * (x.v[t, h].double() - before @ k), k
            )
            outputs[h] = after[h] @ q
        state = after
        states.append(state)
        out.append(outputs)
    return torch.stack(out), torch.stack(states)


def cut(x: SimpleNamespace, span: slice) -> SimpleNamespace:
    return SimpleNamespace(**{name: value[span] for name, value in vars(x).items()})


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(x: SimpleNamespace) -> Tensor:
    return torch.cat([x.q.flatten(1), x.k.flatten(1), x.v.flatten(1)], 1)


def decode(x: SimpleNamespace, p: SimpleNamespace, pool: Tensor, slots: Tensor) -> Tensor:
    out = torch.full((len(slots), 1, VALUE_HEADS, V), float("nan"))
    delta_rule.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=packed(x), a=x.a, b=x.b, A_log=p.a_log, dt_bias=p.dt_bias, scale=K**-0.5,
        initial_state=pool, out=out, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[:, 0]


def update(
    x: SimpleNamespace,
    p: SimpleNamespace,
    pool: Tensor,
    slots: Tensor,
    lengths: list[int],
    **verify: object,
) -> Tensor:
    return delta_rule.fused_sigmoid_gating_delta_rule_update(
        A_log=p.a_log, dt_bias=p.dt_bias, q=x.q[None], k=x.k[None], v=x.v[None], a=x.a, b=x.b,
        initial_state_source=pool, initial_state_indices=slots, cu_seqlens=bounds_of(lengths),
        use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, **verify,
    )[0]  # fmt: skip


def poisoned_pool(slots: Tensor) -> Tensor:
    pool = torch.full((SLOTS, VALUE_HEADS, V, K), float("nan"))
    pool[slots[slots >= 0].long()] = torch.randn(int((slots >= 0).sum()), VALUE_HEADS, V, K)
    return pool


def convolution() -> tuple[Tensor, Tensor]:
    return torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)


def convolved(x: Tensor, history: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Transformers' convolution of x `[T, C]` after history `[C, W - 1]`."""
    both = torch.cat([history, x.T], 1)[None]
    return reference.causal_conv1d_fn(both, weight, bias, "silu")[0, :, WIDTH - 1 :].T


def conv_pool(slots: list[int]) -> Tensor:
    pool = torch.full((SLOTS, CHANNELS, WIDTH - 1), float("nan"))
    pool[slots] = torch.randn(len(slots), CHANNELS, WIDTH - 1)
    return pool
