"""Gated DeltaNet on the CPU against Transformers' Qwen3.5 and a loop over tokens; pools are poisoned wherever nothing may be read."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from sglang_dflash.core.recurrent import gated_delta as gdn
from sglang_dflash.core.recurrent.replay import block_outputs
from sglang_dflash.platform_cpu import gdn_ops as ours
from sglang_dflash.platform_cpu.torch_ops import (
    conv_cache_in_model_dtype,
    note_model_dtype,
    pin_memory,
)

HEADS, VALUE_HEADS, K, V, WIDTH = 2, 4, 16, 24, 4
CHANNELS = 2 * HEADS * K + VALUE_HEADS * V
SLOTS, BLOCK = 7, 5
LENGTHS = [1, 63, 64, 65, 130]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def parameters() -> SimpleNamespace:
    return SimpleNamespace(
        a_log=torch.rand(VALUE_HEADS) * 2 - 1, dt_bias=torch.rand(VALUE_HEADS) - 0.5
    )


def inputs(tokens: int) -> SimpleNamespace:
    """What a layer's recurrence gets for so many tokens; a and b are spread so that memory lasts from one to hundreds of tokens."""
    return SimpleNamespace(
        q=torch.randn(tokens, HEADS, K), k=torch.randn(tokens, HEADS, K), v=torch.randn(tokens, VALUE_HEADS, V),
        a=torch.randn(tokens, VALUE_HEADS) * 3 - 3, b=torch.randn(tokens, VALUE_HEADS),
    )  # fmt: skip


def loop(x: SimpleNamespace, p: SimpleNamespace, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[T, HV, V]` and the state before the first and after every token `[T + 1, HV, V, K]`, in float64."""
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


@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_both_forms_compute_the_gated_delta_rule(tokens: int, with_state: bool) -> None:
    p, x = parameters(), inputs(tokens)
    state = torch.randn(VALUE_HEADS, V, K) if with_state else torch.zeros(VALUE_HEADS, V, K)
    expected, states = loop(x, p, state)
    g, beta = gdn.gates(p.a_log, x.a, p.dt_bias, x.b)
    q, k = gdn.per_value_head(x.q, x.k, VALUE_HEADS, K**-0.5, True)
    out, last, starts = gdn.chunked(q, k, x.v, g, beta, state)
    one_by_one, after = gdn.recurrent(
        q[None], k[None], x.v[None], g[None], beta[None], state[None], every=True
    )
    same, end = gdn.recurrent(q[None], k[None], x.v[None], g[None], beta[None], state[None])
    assert torch.equal(same, one_by_one) and torch.equal(end[0], after[-1])
    if tokens <= 65:
        at_once = block_outputs(q[None], k[None], x.v[None], g[None], beta[None], state[None])
        torch.testing.assert_close(at_once[0], expected.float(), **CLOSE)
    torch.testing.assert_close(out, expected.float(), **CLOSE)
    torch.testing.assert_close(last, states[-1].float(), **CLOSE)
    torch.testing.assert_close(starts, states[:-1:64].float(), **CLOSE)
    torch.testing.assert_close(one_by_one[0], expected.float(), **CLOSE)
    torch.testing.assert_close(after[:, 0], states[1:].float(), **CLOSE)
    for theirs in (
        reference.torch_chunk_gated_delta_rule,
        reference.torch_recurrent_gated_delta_rule,
    ):
        wide = (y.repeat_interleave(VALUE_HEADS // HEADS, 1)[None] for y in (x.q, x.k))
        ref_out, ref_state = theirs(*wide, x.v[None], g=g[None], beta=beta[None], initial_state=state.transpose(1, 2)[None],
                                    output_final_state=True, use_qk_l2norm_in_kernel=True)  # fmt: skip
        torch.testing.assert_close(out, ref_out[0], **CLOSE)
        torch.testing.assert_close(last, ref_state[0].transpose(1, 2), **CLOSE)


def test_strong_decay_and_repeated_keys_stay_finite() -> None:
    """Decays of e^-300 per chunk, and keys that are all the same: the worst cases of the chunked form."""
    p, x = parameters(), inputs(130)
    x.a += 6
    x.k[:] = x.k[0]
    x.b += 6
    expected, states = loop(x, p, torch.randn(VALUE_HEADS, V, K))
    q, k = gdn.per_value_head(x.q, x.k, VALUE_HEADS, K**-0.5, True)
    out, last, _ = gdn.chunked(q, k, x.v, *gdn.gates(p.a_log, x.a, p.dt_bias, x.b), states[0])
    torch.testing.assert_close(out, expected.float(), **CLOSE)
    torch.testing.assert_close(last, states[-1].float(), **CLOSE)


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "read-only"])
def test_prefill_of_a_ragged_batch(in_place: bool) -> None:
    lengths, slots = [130, 1, 30, 64, 65], [5, 2, -1, 0, 3]
    p, x, bounds = parameters(), inputs(sum(lengths)), bounds_of(lengths)
    pool = torch.full((SLOTS, VALUE_HEADS, V, K), float("nan"))
    used = [s for s in slots if s >= 0]
    pool[used] = torch.randn(len(used), VALUE_HEADS, V, K)
    before = pool.clone()
    g, beta = ours.fused_gdn_gating(p.a_log, x.a, x.b, p.dt_bias)
    assert g.shape == beta.shape == (1, sum(lengths), VALUE_HEADS) and g.dtype == torch.float32
    out, nothing, h = ours.chunk_gated_delta_rule(
        q=x.q[None], k=x.k[None], v=x.v[None], g=g, beta=beta, initial_state=pool, initial_state_indices=torch.tensor(slots).int(),
        cu_seqlens=bounds, head_first=False, use_qk_l2norm_in_kernel=True, inplace_update=in_place,
    )  # fmt: skip
    assert nothing is None and h.shape == (1, 3 + 1 + 1 + 1 + 2, VALUE_HEADS, V, K)
    chunk = 0
    for length, slot, start in zip(lengths, slots, bounds[:-1].tolist(), strict=True):
        if slot < 0:
            assert out[0, start : start + length].count_nonzero() == 0
        else:
            expected, states = loop(cut(x, slice(start, start + length)), p, before[slot])
            torch.testing.assert_close(out[0, start : start + length], expected.float(), **CLOSE)
            torch.testing.assert_close(
                pool[slot], (states[-1] if in_place else states[0]).float(), **CLOSE
            )
            torch.testing.assert_close(
                h[0, chunk : chunk - (-length // 64)], states[:-1:64].float(), **CLOSE
            )
        chunk -= -length // 64
    assert pool[[1, 4, 6]].isnan().all()


def packed(x: SimpleNamespace) -> Tensor:
    return torch.cat([x.q.flatten(1), x.k.flatten(1), x.v.flatten(1)], 1)


def decode(x: SimpleNamespace, p: SimpleNamespace, pool: Tensor, slots: Tensor) -> Tensor:
    out = torch.full((len(slots), 1, VALUE_HEADS, V), float("nan"))
    ours.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=packed(x), a=x.a, b=x.b, A_log=p.a_log, dt_bias=p.dt_bias, scale=K**-0.5, initial_state=pool, out=out,
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
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
    return ours.fused_sigmoid_gating_delta_rule_update(
        A_log=p.a_log, dt_bias=p.dt_bias, q=x.q[None], k=x.k[None], v=x.v[None], a=x.a, b=x.b, initial_state_source=pool,
        initial_state_indices=slots, cu_seqlens=bounds_of(lengths), use_qk_l2norm_in_kernel=True, softplus_beta=1.0,
        softplus_threshold=20.0, **verify,
    )[0]  # fmt: skip


def poisoned_pool(slots: Tensor) -> Tensor:
    pool = torch.full((SLOTS, VALUE_HEADS, V, K), float("nan"))
    pool[slots[slots >= 0].long()] = torch.randn(int((slots >= 0).sum()), VALUE_HEADS, V, K)
    return pool


@pytest.mark.parametrize("lengths", [[BLOCK] * 3, [BLOCK, 2, 4], [3, 3, 1]], ids=str)
def test_verify_keeps_every_state_and_touches_none(lengths: list[int]) -> None:
    """Bitwise what decoding the same tokens one by one, request by request, gives."""
    p, x, slots = parameters(), inputs(sum(lengths)), torch.tensor([4, -1, 1], dtype=torch.int32)
    pool = poisoned_pool(slots)
    before, snapshots = pool.clone(), torch.full((SLOTS, BLOCK, VALUE_HEADS, V, K), float("nan"))
    out = update(x, p, pool, slots, lengths, disable_state_update=True, intermediate_states_buffer=snapshots,
                 intermediate_state_indices=torch.arange(SLOTS), cache_steps=BLOCK, retrieve_parent_token=None)  # fmt: skip
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
    start = 0
    for row, length in enumerate(lengths):
        if slots[row] < 0:
            assert out[start : start + length].count_nonzero() == 0 and snapshots[row].isnan().all()
        else:
            for t in range(length):
                token = cut(x, slice(start + t, start + t + 1))
                assert torch.equal(decode(token, p, pool, slots[row : row + 1])[0], out[start + t])
                assert torch.equal(snapshots[row, t], pool[slots[row]])
            assert snapshots[row, length:].isnan().all()
            torch.testing.assert_close(out[start : start + length],
                                       loop(cut(x, slice(start, start + length)), p, before[slots[row]])[0].float(), **CLOSE)  # fmt: skip
        start += length
    assert snapshots[3:].isnan().all()


def test_packed_and_unpacked_decode_agree() -> None:
    p, x, slots = parameters(), inputs(4), torch.tensor([3, 0, -1, 6], dtype=torch.int32)
    pool = poisoned_pool(slots)
    other = pool.clone()
    out = decode(x, p, pool, slots)
    assert torch.equal(out, update(x, p, other, slots, [1] * 4)) and out[2].count_nonzero() == 0
    assert (
        torch.equal(pool.nan_to_num(7.0), other.nan_to_num(7.0))
        and pool[[1, 2, 4, 5]].isnan().all()
    )


def test_a_request_does_not_depend_on_its_batch() -> None:
    """Bitwise: the same requests alone and together, decoding and prefilling."""
    p, x, slots = parameters(), inputs(4), torch.tensor([3, 0, 5, 6])
    pool = poisoned_pool(slots)
    alone = pool.clone()
    out = decode(x, p, pool, slots)
    for i in range(4):
        assert torch.equal(decode(cut(x, slice(i, i + 1)), p, alone, slots[i : i + 1])[0], out[i])
    assert torch.equal(alone[slots], pool[slots])


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


def test_convolution_of_a_ragged_prefill() -> None:
    lengths, slots, known = (
        [1, 70, 2, 9, 3, 1],
        [5, 0, 1, -1, 4, 2],
        [True, False, True, False, True, False],
    )
    (weight, bias), x, bounds = (
        convolution(),
        torch.randn(sum(lengths) + 2, CHANNELS),
        bounds_of(lengths),
    )
    # The slots of requests without a past hold NaN.
    pool = conv_pool([5, 1, 4])
    before = pool.clone()
    out = ours.causal_conv1d_fn(
        x.T, weight, bias, activation="silu", conv_states=pool, has_initial_state=torch.tensor(known), query_start_loc=bounds,
        cache_indices=torch.tensor(slots).int(), seq_lens_cpu=lengths,
    ).T  # fmt: skip
    # Callers split it by channel and view the parts as heads.
    assert out.is_contiguous() and out.shape == x.shape
    for slot, old, start, end in zip(
        slots, known, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
    ):
        if slot < 0:
            assert out[start:end].count_nonzero() == 0
            continue
        history = before[slot] if old else torch.zeros(CHANNELS, WIDTH - 1)
        torch.testing.assert_close(
            out[start:end], convolved(x[start:end], history, weight, bias), **CLOSE
        )
        assert torch.equal(pool[slot], torch.cat([history, x[start:end].T], 1)[:, 1 - WIDTH :])
    assert pool[[3, 6]].isnan().all()


@pytest.mark.parametrize("shared", [True, False], ids=["windows-share-memory", "windows-apart"])
def test_convolution_of_a_verified_block(shared: bool) -> None:
    """Bitwise what decoding its tokens one by one gives; the state stays, every window is kept."""
    (weight, bias), slots = convolution(), torch.tensor([2, -1, 6], dtype=torch.int32)
    x, pool = torch.randn(3, BLOCK, CHANNELS), conv_pool([2, 6])
    before = pool.clone()
    if shared:
        memory = torch.full((SLOTS, CHANNELS, BLOCK + WIDTH - 2), float("nan"))
        windows = memory.as_strided(
            (SLOTS, BLOCK, CHANNELS, WIDTH - 1), (memory.stride(0), 1, memory.stride(1), 1)
        )
    else:
        windows = torch.full((SLOTS, BLOCK, CHANNELS, WIDTH - 1), float("nan"))
    out = ours.causal_conv1d_update(
        x.transpose(1, 2), pool, weight, bias, "silu", conv_state_indices=slots, intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([0, 1, 4]), retrieve_next_token=None,
    ).transpose(1, 2)  # fmt: skip
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
    assert out.view(3 * BLOCK, -1).shape == (3 * BLOCK, CHANNELS) and out[1].count_nonzero() == 0
    torch.testing.assert_close(out[0], convolved(x[0], before[2], weight, bias), **CLOSE)
    for t in range(BLOCK):
        step = ours.causal_conv1d_update(
            x[:, t], pool, weight, bias, "silu", conv_state_indices=slots
        )
        assert torch.equal(step, out[:, t])
        assert torch.equal(windows[0, t], pool[2]) and torch.equal(windows[4, t], pool[6])
    assert pool[[0, 1, 3, 4, 5]].isnan().all() and windows[[1, 2, 3, 5, 6]].isnan().all()


def test_decoding_goes_on_where_prefill_ended() -> None:
    """Convolution and recurrence: 70 tokens prefilled and 6 decoded are 76 prefilled, to rounding."""
    p, (weight, bias), x = parameters(), convolution(), inputs(76)
    conv, pool, slot = conv_pool([]), torch.zeros(SLOTS, VALUE_HEADS, V, K), torch.tensor([3])

    def prefill(tokens: int, conv: Tensor, pool: Tensor) -> Tensor:
        ends = {
            "query_start_loc": bounds_of([tokens]),
            "seq_lens_cpu": [tokens],
            "has_initial_state": torch.tensor([False]),
        }
        mixed = ours.causal_conv1d_fn(
            packed(x)[:tokens].T, weight, bias, conv, cache_indices=slot, **ends
        ).T
        q, k, v = mixed.split([HEADS * K, HEADS * K, VALUE_HEADS * V], 1)
        q, k, v = (
            q.view(1, tokens, HEADS, K),
            k.view(1, tokens, HEADS, K),
            v.view(1, tokens, VALUE_HEADS, V),
        )
        g, beta = ours.fused_gdn_gating(p.a_log, x.a[:tokens], x.b[:tokens], p.dt_bias)
        return ours.chunk_gated_delta_rule(
            q, k, v, g, beta, None, pool, slot, bounds_of([tokens]), False, True
        )[0][0]

    whole = prefill(76, conv.clone(), pool.clone())
    parts = [prefill(70, conv, pool)]
    for t in range(70, 76):
        mixed = ours.causal_conv1d_update(
            packed(x)[t : t + 1], conv, weight, bias, "silu", conv_state_indices=slot
        )
        q, k, v = mixed.split([HEADS * K, HEADS * K, VALUE_HEADS * V], 1)
        token = SimpleNamespace(
            q=q.view(1, HEADS, K),
            k=k.view(1, HEADS, K),
            v=v.view(1, VALUE_HEADS, V),
            a=x.a[[t]],
            b=x.b[[t]],
        )
        parts.append(decode(token, p, pool, slot))
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)


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
    by_hand = (gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(
        -1, V
    ) * theirs.weight
    torch.testing.assert_close(ours.rms_norm_forward(fake, x, z), by_hand, **CLOSE)
    attended, gate = torch.randn(5, 32), torch.randn(5, 4, 16)[..., :8]
    expected = attended * gate.reshape(5, 32).sigmoid()
    assert torch.equal(ours.fused_sigmoid_mul(attended, gate), expected)
    assert ours.fused_sigmoid_mul(attended, gate, inplace=True) is attended and torch.equal(
        attended, expected
    )


def test_shared_expert_gate() -> None:
    hidden, shared, routed = torch.randn(3, 5, 32)
    weight = torch.randn(32)
    expected = routed + (hidden @ weight).sigmoid()[:, None] * shared
    ours.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, expected, **CLOSE)


def test_commit_takes_the_accepted_snapshot_and_the_crossed_boundary() -> None:
    layers = 2
    caches = SimpleNamespace(
        temporal=torch.full((layers, SLOTS, 3), -1.0), intermediate_ssm=torch.rand(layers, 4, BLOCK, 3),
        conv=[torch.full((layers, SLOTS, 4, 2), -1.0)], intermediate_conv_window=[torch.rand(layers, 4, BLOCK, 4, 2)],
    )  # fmt: skip
    slots, steps = torch.tensor([5, 0, -1], dtype=torch.int32), torch.tensor([4, 0, 2])
    boundaries, crossed = torch.tensor([1, 2, 3]), torch.tensor([-1, 3, -1])
    ours.scatter_mamba_states_after_mtp_verify(caches, slots, steps, boundaries, crossed)
    pairs = [
        (caches.temporal, caches.intermediate_ssm),
        (caches.conv[0], caches.intermediate_conv_window[0]),
    ]
    for states, snapshots in pairs:
        assert torch.equal(states[:, 5], snapshots[:, 0, 4]) and torch.equal(
            states[:, 0], snapshots[:, 1, 0]
        )
        assert (
            torch.equal(states[:, 2], snapshots[:, 1, 3]) and (states[:, [1, 3, 4, 6]] == -1).all()
        )
    ours.scatter_mamba_states_after_mtp_verify(
        caches, slots[:1], steps[:1], None, None, src_indices_raw=torch.tensor([3])
    )
    assert all(torch.equal(states[:, 5], snapshots[:, 3, 4]) for states, snapshots in pairs)


def test_states_are_tracked_at_boundaries() -> None:
    conv, ssm = torch.rand(2, SLOTS, 4, 2), torch.rand(2, SLOTS, 3)
    expected = conv.clone(), ssm.clone()
    for pool in expected:
        pool[:, 6] = pool[:, 1]
    mask = torch.tensor([False, True, True, True])
    rows = torch.tensor([0, 1, -1, 2], dtype=torch.int32), mask, torch.tensor([5, 6, 4, -1])
    one = conv[1].clone(), ssm[1].clone()
    ours.track_mamba_states_all_layers(conv, ssm, *rows, 4)
    ours.track_mamba_states_if_needed(*one, *rows, 4)
    assert all(torch.equal(x, y) for x, y in zip((conv, ssm), expected, strict=True))
    assert all(torch.equal(x, y[1]) for x, y in zip(one, expected, strict=True))


def test_what_is_not_served_is_refused() -> None:
    p, x = parameters(), inputs(1)
    with pytest.raises(NotImplementedError, match="cache_ring"):
        update(x, p, torch.zeros(1, VALUE_HEADS, V, K), torch.zeros(1), [1], cache_ring=True)
    with pytest.raises(NotImplementedError, match="quant"):
        ours.fused_sigmoid_mul(torch.ones(1, 2), torch.ones(1, 2), quant=True)


def test_conv_cache_follows_the_model_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    config = SimpleNamespace()
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    assert conv_cache_in_model_dtype(mamba2_state_dtype, config).conv == torch.bfloat16
    note_model_dtype(None, SimpleNamespace(hf_text_config=config, dtype=torch.float32))
    assert conv_cache_in_model_dtype(mamba2_state_dtype, config).conv == torch.float32
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16")
    assert conv_cache_in_model_dtype(mamba2_state_dtype, config).conv == torch.float16
    tensor = torch.ones(1)
    assert pin_memory(tensor) is tensor


def test_every_hook_finds_its_target_and_has_its_arguments() -> None:
    """SGLang only logs a target that it does not find. In a process of its own: hooks stay for its life."""
    code = """
import inspect, pkgutil
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_dflash.platform_cpu import gdn_ops, torch_ops
hooks.register_hooks()
# Slow to import, and no server with a draft starts without these.
for target in [t for t in HookRegistry._hooks if ".model_runner." in t or ".models.dflash." in t]:
    del HookRegistry._hooks[target]
HookRegistry.apply_hooks()
assert set(HookRegistry._hooks) == HookRegistry._patched, set(HookRegistry._hooks) - HookRegistry._patched
for target, replacement in gdn_hooks.REPLACEMENTS.items():
    theirs, own = (inspect.signature(f).parameters for f in (pkgutil.resolve_name(target).__wrapped__, replacement))
    assert list(theirs) == list(own), target
    assert [p.default for p in theirs.values()] == [p.default for p in own.values()], target
"""
    subprocess.run([sys.executable, "-c", code], check=True)
