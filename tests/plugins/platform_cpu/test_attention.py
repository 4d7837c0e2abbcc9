"""The CPU attention against a loop over queries and keys; the helpers against other libraries."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import mmh3
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from sglang_dflash.plugins.platform_cpu import attention
from sglang_dflash.plugins.platform_cpu.attention import speculative_cache_locs
from sglang_dflash.plugins.platform_cpu.torch_ops import assign_req_to_token, murmur_hash32

# Of 16 and more dims SDPA sums otherwise than of 8.
GROUPS, SHARED, DIM = 2, 3, 16


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
        made.rows = torch.tensor(rows or list(range(len(prefixes))))
        made.prefixes, made.counts = prefixes, counts
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


# Requests of one padded length and of two, prefilled, decoded and verified.
MIXED = [([9, 80, 4], [1, 1, 1]), ([9, 80, 11], [4, 4, 4]), ([0, 70, 3], [7, 2, 9])]


@pytest.mark.parametrize("window", [-1, 3], ids=lambda w: f"window{w}")
@pytest.mark.parametrize(("prefixes", "counts"), MIXED, ids=str)
def test_a_learned_sink_is_one_more_logit(
    prefixes: list[int], counts: list[int], window: int
) -> None:
    pool = Pool([p + c for p, c in zip(prefixes, counts, strict=True)])
    backend, q = pool.backend(prefixes, counts), queries(sum(counts))
    sinks = torch.randn(GROUPS * SHARED).bfloat16()
    got = backend.forward_extend(q, None, None, layer(window=window), None, sinks=sinks)
    row = 0
    for request, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        k, v = (part.transpose(0, 1) for part in pool.of(request))  # [G, T, D]
        own = heads(q[row : row + count]).permute(1, 2, 0, 3)  # [G, g, n, D]
        logits = own @ k[:, None].transpose(-1, -2) * DIM**-0.5
        position, column = torch.arange(count)[:, None] + prefix, torch.arange(k.shape[1])
        hidden = (column > position) | ((window >= 0) & (column < position - window))
        logits = logits.masked_fill(hidden, -torch.inf)
        sink = sinks.float().view(GROUPS, SHARED, 1, 1).expand(-1, -1, count, -1)
        weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        want = (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1)
        torch.testing.assert_close(got[row : row + count], want, atol=1e-5, rtol=1e-5)
        row += count


class LatentPool(Pool):
    """One K of 32 numbers for all heads, the first 16 of which are V."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.keys = torch.randn(len(self.keys), 1, DIM + 16)
        self.values = self.keys[..., :DIM]


LATENT = SimpleNamespace(**{**vars(layer()), "tp_k_head_num": 1, "qk_head_dim": DIM + 16})


@pytest.mark.parametrize(("prefixes", "counts"), MIXED, ids=str)
def test_latent_attention(prefixes: list[int], counts: list[int]) -> None:
    """Its values are narrower than its keys."""
    pool = LatentPool([p + c for p, c in zip(prefixes, counts, strict=True)])
    q = torch.randn(sum(counts), GROUPS * SHARED, DIM + 16)
    got = pool.backend(prefixes, counts).forward_extend(q.flatten(1), None, None, LATENT, None)
    row = 0
    for request, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        k, v = (part[:, 0] for part in pool.of(request))
        logits = q[row : row + count].transpose(0, 1) @ k.T * DIM**-0.5
        later = torch.arange(len(k)) > torch.arange(count)[:, None] + prefix
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        want = (weights @ v).transpose(0, 1).flatten(1)
        torch.testing.assert_close(got[row : row + count], want, atol=1e-5, rtol=1e-5)
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


LEARNED = torch.randn(GROUPS * SHARED)


@pytest.mark.parametrize(
    ("pool_of", "served", "others"),
    [(Pool, layer(), {}), (Pool, layer(), {"sinks": LEARNED}), (LatentPool, LATENT, {})],
    ids=["heads", "sinks", "latent"],
)
def test_a_token_does_not_depend_on_the_tokens_verified_with_it(
    pool_of: type[Pool], served: SimpleNamespace, others: dict[str, torch.Tensor]
) -> None:
    """Bitwise: each token of a block of 8, and the same token decoded alone. Lengths cross a
    padded length, and the first query of a block sees a shorter context than the last."""
    for length in (20, 61, 125, 253, 510, 700):
        pool, q = pool_of([length + 8]), torch.randn(8, GROUPS * SHARED * served.qk_head_dim)
        block = pool.backend([length], [8]).forward_extend(q, None, None, served, None, **others)
        for i in range(8):
            alone = pool.backend([length + i], [1])
            got = alone.forward_extend(q[i : i + 1], None, None, served, None, **others)
            assert torch.equal(got[0], block[i]), (length, i)


def test_a_sigmoid_does_not_depend_on_its_place() -> None:
    """Bitwise, among any number of others."""
    x = torch.randn(200)
    whole = attention.sigmoid(x)
    for count in range(1, 200):
        assert torch.equal(attention.sigmoid(x[:count]), whole[:count]), count
        assert torch.equal(attention.sigmoid(x[count:]), whole[count:]), count
    torch.testing.assert_close(whole.view(8, 25), attention.sigmoid(x.view(8, 25)))


def test_padding_changes_no_answer() -> None:
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
        # Of DeepSeek V3.2.
        (False, 0.0, {"topk_indices": torch.zeros(1, 2)}, "attention to chosen tokens"),
        # Of Hy3.
        (False, 0.0, {"attn_sink": torch.zeros(2)}, "a sink of latent attention"),
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
