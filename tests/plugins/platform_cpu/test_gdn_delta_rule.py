"""The gated delta rule against a loop over tokens and Transformers' Qwen3.5.

Pools hold NaN in every slot that may not be read.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from sglang_dflash.drafting.recurrent import gated_delta as gdn
from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.plugins.platform_cpu.gdn_ops import delta_rule
from tests.plugins.platform_cpu.gdn_cases import (
    BLOCK,
    CLOSE,
    HEADS,
    SLOTS,
    VALUE_HEADS,
    K,
    V,
    bounds_of,
    cut,
    decode,
    inputs,
    loop,
    parameters,
    poisoned_pool,
    update,
)

LENGTHS = [1, 63, 64, 65, 130]


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
        at_once = replay.block_outputs(
            q[None], k[None], x.v[None], g[None], beta[None], state[None]
        )
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
        ref_out, ref_state = theirs(
            *wide, x.v[None], g=g[None], beta=beta[None],
            initial_state=state.transpose(1, 2)[None], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out, ref_out[0], **CLOSE)
        torch.testing.assert_close(last, ref_state[0].transpose(1, 2), **CLOSE)


def test_strong_decay_and_repeated_keys_stay_finite() -> None:
    """Decays of e^-300 per chunk and identical keys: the worst cases of the chunked form."""
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
    g, beta = delta_rule.fused_gdn_gating(p.a_log, x.a, x.b, p.dt_bias)
    assert g.shape == beta.shape == (1, sum(lengths), VALUE_HEADS) and g.dtype == torch.float32
    out, nothing, h = delta_rule.chunk_gated_delta_rule(
        q=x.q[None], k=x.k[None], v=x.v[None], g=g, beta=beta, initial_state=pool,
        initial_state_indices=torch.tensor(slots).int(), cu_seqlens=bounds, head_first=False,
        use_qk_l2norm_in_kernel=True, inplace_update=in_place,
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


@pytest.mark.parametrize("lengths", [[BLOCK] * 3, [BLOCK, 2, 4], [3, 3, 1]], ids=str)
def test_verify_keeps_every_state_and_touches_none(lengths: list[int]) -> None:
    """Bitwise equal to decoding the same tokens one by one, request by request."""
    p, x, slots = parameters(), inputs(sum(lengths)), torch.tensor([4, -1, 1], dtype=torch.int32)
    pool = poisoned_pool(slots)
    before, snapshots = pool.clone(), torch.full((SLOTS, BLOCK, VALUE_HEADS, V, K), float("nan"))
    out = update(
        x, p, pool, slots, lengths, disable_state_update=True,
        intermediate_states_buffer=snapshots, intermediate_state_indices=torch.arange(SLOTS),
        cache_steps=BLOCK, retrieve_parent_token=None,
    )  # fmt: skip
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
            expected, _ = loop(cut(x, slice(start, start + length)), p, before[slots[row]])
            torch.testing.assert_close(out[start : start + length], expected.float(), **CLOSE)
        start += length
    assert snapshots[3:].isnan().all()


def test_decode_is_the_same_packed_unpacked_and_one_by_one() -> None:
    """Bitwise: a request does not depend on its batch."""
    p, x, slots = parameters(), inputs(4), torch.tensor([3, 0, -1, 6], dtype=torch.int32)
    pool = poisoned_pool(slots)
    unpacked, single = pool.clone(), pool.clone()
    out = decode(x, p, pool, slots)
    assert torch.equal(out, update(x, p, unpacked, slots, [1] * 4)) and out[2].count_nonzero() == 0
    for i in range(4):
        assert torch.equal(decode(cut(x, slice(i, i + 1)), p, single, slots[i : i + 1])[0], out[i])
    for each in (unpacked, single):
        assert torch.equal(pool.nan_to_num(7.0), each.nan_to_num(7.0))
    assert pool[[1, 2, 4, 5]].isnan().all()
