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
    return SimpleNamespace(
        attn_type=kind, sliding_window_size=window, scaling=DIM**-0.5, is_cross_attention=False,
        logit_cap=0.0, layer_id=0, tp_k_head_num=GROUPS, tp_q_head_num=GROUPS * SHARED,
        qk_head_dim=DIM, v_head_dim=DIM,
    )  # fmt: skip


class Pool:
    """K and V of random slots for requests of these lengths, and their rows of the table."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        slots = torch.randperm(sum(lengths) + 1)
        self.keys, self.values = torch.randn(2, len(slots), GROUPS, DIM).to(dtype)
        self.table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
        self.slots = list(slots[:-1].split(lengths))
        for row, own in zip(self.table, self.slots, strict=True):
            row[: len(own)] = own

    def backend(self, prefixes: list[int], counts: list[int], rows: list[int] | None = None):
        """Make a backend for requests (the table's first ones without `rows`), by their numbers of
        tokens before the forward and in it."""
        made = attention.CpuAttentionBackend.__new__(attention.CpuAttentionBackend)
        made.req_to_token_pool = SimpleNamespace(req_to_token=self.table)
        made.token_to_kv_pool = SimpleNamespace(
            get_key_buffer=lambda _: self.keys, get_value_buffer=lambda _: self.values
        )
        requests = torch.tensor(rows or list(range(len(prefixes))))
        made.layout = attention.Layout(requests, prefixes, counts)
        made.pieces = {}
        return made

    def of(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[self.slots[request]], self.values[self.slots[request]]


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


def queries(count: int) -> torch.Tensor:
    return torch.randn(count, GROUPS * SHARED * DIM)


def heads(q: torch.Tensor) -> torch.Tensor:
    return q.view(-1, GROUPS, SHARED, DIM)


@pytest.mark.parametrize("window", [-1, 0, 3], ids=lambda w: f"window{w}")
@pytest.mark.parametrize(
    ("prefixes", "counts"),
    [([0], [1]), ([0], [7]), ([9], [1]), ([9], [5]),
     ([9, 80, 4], [1, 1, 1]), ([9, 80, 11], [4, 4, 4]), ([0, 70, 3], [7, 2, 9])],
    ids=str,
)  # fmt: skip
def test_causal_attention(
    prefixes: list[int], counts: list[int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode, verify and prefill, of one request and of several."""
    # Chunks of 3 queries, so that prefill crosses chunk borders at these sizes.
    monkeypatch.setattr(attention, "QUERY_CHUNK", 3)
    pool = Pool([p + c for p, c in zip(prefixes, counts, strict=True)])
    backend, q = pool.backend(prefixes, counts), queries(sum(counts))
    got = backend.forward_extend(q, None, None, layer(window=window), None)
    row = 0
    for request, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        own = slice(row, row + count)
        k, v = pool.of(request)
        want = dense(heads(q[own]), k, v, prefix, True, window)
        torch.testing.assert_close(got[own], want, atol=1e-5, rtol=1e-5)
        row += count


def test_encoder_only_attention_sees_everything() -> None:
    pool, q = Pool([10]), queries(4)
    got = pool.backend([6], [4]).forward_extend(
        q, None, None, layer(AttentionType.ENCODER_ONLY), None
    )
    want = dense(heads(q), *pool.of(0), 6, False, -1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_a_request_does_not_depend_on_its_batch(count: int) -> None:
    """Bitwise: the same request by itself, beside one of its padded length, and beside others."""
    pool, q = Pool([70, 75, 300, 5]), queries(4 * count)
    prefixes = [length - count for length in (70, 75, 300, 5)]
    one = pool.backend(prefixes[:1], [count]).forward_extend(q[:count], None, None, layer(), None)
    for others in (2, 3, 4):
        backend = pool.backend(prefixes[:others], [count] * others)
        together = backend.forward_extend(q[: others * count], None, None, layer(), None)
        assert torch.equal(together[:count], one)


def test_a_token_does_not_depend_on_the_tokens_verified_with_it() -> None:
    """Bitwise: each token of a block of 8, and the same token decoded alone. Lengths cross a
    padded length, and the first query of a block sees a shorter context than the last."""
    for length in (20, 61, 125, 253, 510, 700):
        pool, q = Pool([length + 8]), queries(8)
        block = pool.backend([length], [8]).forward_extend(q, None, None, layer(), None)
        for i in range(8):
            alone = pool.backend([length + i], [1])
            assert torch.equal(
                alone.forward_extend(q[i : i + 1], None, None, layer(), None)[0], block[i]
            ), (length, i)


def test_what_padding_holds_reaches_nobody() -> None:
    """Neither the slot for padded tokens nor another request's, NaN or not."""
    pool, q = Pool([9, 20]), queries(2)
    pool.table[0, 9:] = pool.slots[1][0]
    want = pool.backend([8], [1]).forward_extend(q[:1], None, None, layer(), None)
    pool.keys[pool.slots[1]] = pool.values[pool.slots[1]] = float("nan")
    unused = [i for i in range(len(pool.keys)) if i not in pool.table.unique()]
    pool.keys[unused] = pool.values[unused] = float("nan")
    got = pool.backend([8, 19], [1, 1]).forward_extend(q, None, None, layer(), None)
    assert torch.equal(got[:1], want) and got[1].isnan().all()


def test_padded_rows_get_zeros() -> None:
    """SGLang pads a batch of data-parallel attention."""
    pool, q = Pool([9]), queries(3)
    got = pool.backend([8], [1]).forward_extend(q, None, None, layer(), None)
    assert got.shape == (3, GROUPS * SHARED * DIM) and not got[1:].any()


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
    """It is not computed as if it were ordinary attention."""
    backend = attention.CpuAttentionBackend.__new__(attention.CpuAttentionBackend)
    fake = SimpleNamespace(**{**vars(layer()), "is_cross_attention": crosses, "logit_cap": cap})
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
