"""Projections, norm and gates around the recurrence, and features that are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from sglang_dflash.plugins.platform_cpu.gdn_ops import elementwise as ours
from tests.plugins.platform_cpu.gdn_cases import (
    CLOSE,
    HEADS,
    VALUE_HEADS,
    K,
    V,
    inputs,
    parameters,
    update,
)


def test_split_norm_and_output_gate() -> None:
    q, k, v, z = (
        torch.randn(5, n * d)
        for n, d in ((HEADS, K), (HEADS, K), (VALUE_HEADS, V), (VALUE_HEADS, V))
    )
    b, a = torch.randn(2, 5, VALUE_HEADS)
    shapes = (HEADS, VALUE_HEADS, K, V)
    qkv, *rest = ours.fused_qkvzba_split_reshape_cat_contiguous(
        torch.cat([q, k, v, z], 1), torch.cat([b, a], 1), *shapes
    )
    assert torch.equal(qkv, torch.cat([q, k, v], 1))
    assert all(
        torch.equal(x, y) for x, y in zip(rest, (z.view(5, VALUE_HEADS, V), b, a), strict=True)
    )
    theirs = reference.Qwen3_5RMSNormGated(V, eps=1e-6)
    theirs.weight.data = torch.randn(V)
    fake = SimpleNamespace(
        weight=theirs.weight, eps=1e-6, group_size=None, norm_before_gate=True, activation="swish"
    )
    x, z = v.view(-1, V), z.view(-1, V)
    torch.testing.assert_close(ours.rms_norm_forward(fake, x, z), theirs(x, z), **CLOSE)
    torch.testing.assert_close(
        ours.rms_norm_forward(fake, x, z.view(5, VALUE_HEADS, V)), theirs(x, z), **CLOSE
    )
    assert ours.rms_norm_forward(fake, x.bfloat16(), z.bfloat16()).dtype == torch.bfloat16
    fake.norm_before_gate, fake.group_size = False, V // 2
    gated = (x * F.silu(z)).view(-1, 2, V // 2)
    expected_norm = (gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(
        -1, V
    ) * theirs.weight
    torch.testing.assert_close(ours.rms_norm_forward(fake, x, z), expected_norm, **CLOSE)
    attended, gate = torch.randn(5, 32), torch.randn(5, 4, 16)[..., :8]
    expected = attended * gate.reshape(5, 32).sigmoid()
    assert torch.equal(ours.fused_sigmoid_mul(attended, gate), expected)
    assert ours.fused_sigmoid_mul(attended, gate, inplace=True) is attended and torch.equal(
        attended, expected
    )


def test_split_and_norm_of_qwen3_next() -> None:
    qkvz = torch.randn(1, 5, 2 * HEADS * K + 2 * VALUE_HEADS * V)
    ba = torch.randn(1, 5, 2 * VALUE_HEADS)
    layer = SimpleNamespace(num_k_heads=HEADS, num_v_heads=VALUE_HEADS, head_k_dim=K, head_v_dim=V)
    split = qwen3_next.Qwen3NextGatedDeltaNet.fix_query_key_value_ordering
    q, k, v, z, b, a = (part[0] for part in split(layer, qkvz, ba))
    got = ours.fused_qkvzba_split_reshape_cat(qkvz[0], ba[0], HEADS, VALUE_HEADS, K, V)
    expected = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1), z, b, a
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    theirs = qwen3_next.Qwen3NextRMSNormGated(V, eps=1e-6)
    theirs.weight.data = torch.randn(V)
    fake = SimpleNamespace(weight=theirs.weight, eps=1e-6, activation="silu")
    torch.testing.assert_close(ours.gated_norm_forward(fake, v, z), theirs(v, z), **CLOSE)
    assert ours.gated_norm_forward(fake, v.bfloat16(), z.bfloat16()).dtype == torch.bfloat16


def test_shared_expert_gate() -> None:
    hidden, shared, routed = torch.randn(3, 5, 32)
    weight = torch.randn(32)
    expected = routed + (hidden @ weight).sigmoid()[:, None] * shared
    ours.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, expected, **CLOSE)


def test_what_is_not_served_is_refused() -> None:
    p, x = parameters(), inputs(1)
    with pytest.raises(NotImplementedError, match="cache_ring"):
        update(x, p, torch.zeros(1, VALUE_HEADS, V, K), torch.zeros(1), [1], cache_ring=True)
    with pytest.raises(NotImplementedError, match="quant"):
        ours.fused_sigmoid_mul(torch.ones(1, 2), torch.ones(1, 2), quant=True)
