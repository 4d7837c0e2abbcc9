"""The CPU attention against a loop over queries and keys; the helpers against other libraries."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import mmh3
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from sglang_dflash.platform_cpu import attention
from sglang_dflash.platform_cpu.attention import speculative_cache_locs
from sglang_dflash.platform_cpu.torch_ops import assign_req_to_token, murmur_hash32

GROUPS, SHARED, DIM = 2, 3, 8


def layer(kind: AttentionType = AttentionType.DECODER, window: int = -1) -> SimpleNamespace:
    return SimpleNamespace(attn_type=kind, sliding_window_size=window, scaling=DIM**-0.5)


def span(prefix: int, count: int) -> attention.Span:
    slots = torch.arange(prefix + count)
    return attention.Span(slice(0, count), prefix, slots, slots)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, causal: bool, window: int
) -> torch.Tensor:
    out = torch.zeros(len(q), GROUPS, SHARED, DIM)
    for i in range(len(q)):
        position = prefix + i
        seen = [
            p
            for p in range(len(k))
            if not causal or (p <= position and (window < 0 or p >= position - window))
        ]
        for g in range(GROUPS):
            for s in range(SHARED):
                scores = torch.stack([q[i, g, s] @ k[p, g] for p in seen]) / math.sqrt(DIM)
                out[i, g, s] = scores.softmax(0) @ v[seen, g]
    return out.flatten(1)


@pytest.mark.parametrize("window", [-1, 0, 3], ids=lambda w: f"window{w}")
@pytest.mark.parametrize(("prefix", "count"), [(0, 1), (0, 7), (9, 1), (9, 5)], ids=str)
def test_causal_attention(
    prefix: int, count: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of 3 queries, so that prefill crosses chunk borders at these sizes.
    monkeypatch.setattr(attention, "QUERY_CHUNK", 3)
    q = torch.randn(count, GROUPS, SHARED, DIM)
    k, v = torch.randn(2, prefix + count, GROUPS, DIM)
    got = attention.attend(q, k, v, span(prefix, count), layer(window=window))
    torch.testing.assert_close(got, dense(q, k, v, prefix, True, window), atol=1e-5, rtol=1e-5)


def test_encoder_only_attention_sees_everything() -> None:
    q, (k, v) = torch.randn(4, GROUPS, SHARED, DIM), torch.randn(2, 10, GROUPS, DIM)
    got = attention.attend(q, k, v, span(6, 4), layer(AttentionType.ENCODER_ONLY))
    torch.testing.assert_close(got, dense(q, k, v, 6, False, -1), atol=1e-5, rtol=1e-5)


def test_a_request_does_not_depend_on_its_batch() -> None:
    """Bitwise: the same request by itself and beside another."""
    backend = attention.CpuAttentionBackend.__new__(attention.CpuAttentionBackend)
    keys, values = torch.randn(2, 64, GROUPS, DIM)
    backend.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda _: keys,
        get_value_buffer=lambda _: values,
        set_kv_buffer=lambda *a: None,
    )
    fake = SimpleNamespace(
        **layer().__dict__, is_cross_attention=False, logit_cap=0.0, layer_id=0,
        tp_k_head_num=GROUPS, tp_q_head_num=GROUPS * SHARED, qk_head_dim=DIM, v_head_dim=DIM,
    )  # fmt: skip
    slots = torch.randperm(64)
    one, other = (
        attention.Span(slice(0, 4), 6, slots[:10], slots[:10]),
        attention.Span(slice(4, 7), 30, slots[10:43], slots[10:43]),
    )
    q = torch.randn(7, GROUPS * SHARED * DIM)
    batch = SimpleNamespace(out_cache_loc=None)
    backend.sliding_loc, backend.spans = None, [one, other]
    both = backend.forward_extend(q, None, None, fake, batch)
    backend.spans = [one]
    assert torch.equal(both[:4], backend.forward_extend(q[:4], None, None, fake, batch))


@pytest.mark.parametrize(
    ("crosses", "cap", "others", "kind"),
    [
        (True, 0.0, {}, "cross attention"),
        (False, 0.0, {"sinks": torch.zeros(2)}, "an attention sink"),
        # Of Gemma 2.
        (False, 50.0, {}, "a cap on attention logits"),
    ],
)
def test_attention_of_another_kind_is_refused(
    crosses: bool, cap: float, others: dict, kind: str
) -> None:
    """And not computed as if it were ordinary attention."""
    backend = attention.CpuAttentionBackend.__new__(attention.CpuAttentionBackend)
    fake = SimpleNamespace(**layer().__dict__, is_cross_attention=crosses, logit_cap=cap)
    q = torch.randn(1, GROUPS * SHARED * DIM)
    with pytest.raises(NotImplementedError, match=kind):
        backend.forward_extend(q, q, q, fake, SimpleNamespace(), **others)


def test_seeded_sampling_hashes_as_murmur3() -> None:
    seeds, positions, columns = (
        torch.tensor([42, 2**40 + 7, 0]),
        torch.tensor([0, 77, 31000]),
        torch.tensor([0, 1, 1023, 248319]),
    )
    hashed = murmur_hash32(seeds, positions, columns)
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for j, column in enumerate(columns.tolist()):
            assert int(hashed[i, j]) == mmh3.hash(
                struct.pack("<qii", seed, position, column), 0, signed=False
            )


def test_slots_are_entered_and_found_again() -> None:
    table, new = torch.zeros(4, 16, dtype=torch.int32), torch.arange(100, 107)
    assign_req_to_token(
        torch.tensor([2, 0]), table, torch.tensor([3, 5]), torch.tensor([7, 8]), new, 2
    )
    assert (
        table[2, 3:7].tolist() == [100, 101, 102, 103]
        and table[0, 5:8].tolist() == [104, 105, 106]
        and table.sum() == new.sum()
    )
    found = speculative_cache_locs(
        req_pool_indices=torch.tensor([2, 0]), req_to_token=table,
        start_offset=torch.tensor([4, 5]), end_offset=torch.tensor([7, 8]),
        batch_size=2, draft_token_num=3, device="cpu",
    )  # fmt: skip
    assert found.tolist() == [101, 102, 103, 104, 105, 106]
