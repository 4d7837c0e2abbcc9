"""Arguments of those Triton functions of SGLang that the plain-CPU platform replaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

HEADS, VALUE_HEADS, DIM, TOKENS, WIDTH = 2, 4, 16, 4, 4
CHANNELS = 2 * HEADS * DIM + VALUE_HEADS * DIM


def states() -> SimpleNamespace:
    """Recurrent states and snapshots of 2 layers, 7 slots, 4 rows and 5 block positions."""
    return SimpleNamespace(
        temporal=torch.zeros(2, 7, 3),
        intermediate_ssm=torch.rand(2, 4, 5, 3),
        conv=[torch.zeros(2, 7, 4, 2)],
        intermediate_conv_window=[torch.rand(2, 4, 5, 4, 2)],
    )


def triton_arguments() -> dict[str, tuple[Any, ...]]:
    """Positional arguments of every Triton function, by the row's last names."""
    one, bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([0, TOKENS]).int()
    slot, mask = one.long(), torch.tensor([True])
    q = torch.randn(1, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    v = torch.randn(1, TOKENS, VALUE_HEADS, DIM, dtype=torch.bfloat16)
    a, a_log = torch.randn(TOKENS, VALUE_HEADS), torch.randn(VALUE_HEADS)
    pool = torch.zeros(7, VALUE_HEADS, DIM, DIM)
    weight, windows = torch.randn(CHANNELS, WIDTH), torch.zeros(7, CHANNELS, WIDTH - 1)
    x, gate = torch.randn(TOKENS, 32), torch.randn(TOKENS, 32)
    conv, ssm = torch.zeros(2, 7, 4, 2), torch.zeros(2, 7, 3)
    norm = SimpleNamespace(weight=torch.ones(DIM), bias=None, eps=1e-6, group_size=None,
                           norm_before_gate=True, activation="swish")  # fmt: skip
    projected = (
        torch.randn(TOKENS, CHANNELS + VALUE_HEADS * DIM), torch.randn(TOKENS, 2 * VALUE_HEADS),
        HEADS, VALUE_HEADS, DIM, DIM,
    )  # fmt: skip
    out = torch.empty(TOKENS, 1, VALUE_HEADS, DIM)
    table = torch.zeros(2, 8, dtype=torch.int32)
    rows = (one, mask, slot, 1)
    return {
        "triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous": projected,
        "triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat": projected,
        "causal_conv1d_triton.causal_conv1d_fn": (
            torch.randn(CHANNELS, TOKENS), weight, None, windows, bounds, [TOKENS], one, ~mask,
        ),
        "causal_conv1d_triton.causal_conv1d_update": (
            torch.randn(1, CHANNELS), windows, weight, None, "silu", None, one,
        ),
        "fused_gdn_gating.fused_gdn_gating": (a_log, a, a, a_log),
        "chunk.chunk_gated_delta_rule": (
            q, q, v, a[None].bfloat16(), a[None].bfloat16(), None, pool, one, bounds, False, True,
        ),
        "fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": (
            torch.randn(TOKENS, CHANNELS), a, a, a_log, a_log, 1.0, pool, out,
            torch.arange(TOKENS).int(), True,
        ),
        "fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update": (
            a_log, a, a_log, 1.0, 20.0, q, q, v, a, pool, one, None, True, bounds,
        ),
        "RMSNorm.forward": (norm, torch.randn(TOKENS, DIM), torch.randn(TOKENS, DIM)),
        "FusedRMSNormGated.forward": (norm, torch.randn(TOKENS, DIM), torch.randn(TOKENS, DIM)),
        "elementwise.fused_sigmoid_mul": (x, gate),
        "elementwise.fused_gate_sigmoid_mul": (x, torch.randn(32), gate),
        "elementwise.fused_gate_sigmoid_mul_add": (x, torch.randn(32), gate, x.clone()),
        "mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify": (
            states(), one, slot, None, None,
        ),
        "mamba_state_scatter_triton.track_mamba_states_if_needed": (conv[0], ssm[0], *rows),
        "mamba_state_scatter_triton.track_mamba_states_all_layers": (conv, ssm, *rows),
        "table_qk_norm_rope.table_qk_norm_rope_": (
            torch.randn(TOKENS, 4 * DIM).bfloat16(), torch.arange(TOKENS), torch.ones(DIM),
            torch.ones(DIM), torch.randn(9, DIM), 2, 1, DIM, 1e-6,
        ),
        "softcap.softcap_inplace_logits": (torch.randn(TOKENS, DIM), 30.0),
        "allocation.assign_req_to_token_pool_func": (
            slot, table, slot, slot + 2, torch.arange(2), 1,
        ),
    }  # fmt: skip
