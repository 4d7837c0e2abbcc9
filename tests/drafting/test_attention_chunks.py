"""The reference backend in chunks of bounded size: the same result, and memory that does not grow
with the context."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import LayerAttention, Reach
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable, RequestSlots
from sglang_dflash.drafting.attention.visibility import context_positions
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.options import Options
from tests.conftest import kv_groups, random_model, raw_config, write_kv

LAYERS = (
    LayerAttention(None, False),
    LayerAttention(None, True),
    LayerAttention(9, True),
    LayerAttention(2, True),
    LayerAttention(9, False),
)
BLOCK, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 8
ENTRIES = 120


def table(lengths: list[int], reach: Reach) -> ContextTable:
    """A third of the entries dead."""
    seq_lens = torch.tensor(lengths)
    positions = context_positions(seq_lens, reach.tokens_read(max(lengths)), reach)
    entries = torch.randint(ENTRIES, positions.shape)
    live = (positions < seq_lens[:, None]) & (torch.rand(positions.shape) < 0.67)
    return ContextTable(entries.where(live, -1).int(), seq_lens)


@pytest.mark.parametrize("reach", [Reach(), Reach(7, 2)], ids=["whole", "window"])
@pytest.mark.parametrize("chunk_bytes", [1, 1500, 4000, 9000, 40000])
def test_chunks_give_what_one_copy_gives(chunk_bytes: int, reach: Reach) -> None:
    """Chunks hold from one column to several requests."""
    known = table([30, 0, 5, 17], reach)
    kv = torch.randn(ENTRIES + 1, len(LAYERS), 2, KV_HEADS, HEAD_DIM)
    layers = [replace(layer, reach=reach) for layer in LAYERS]
    whole, cut = TorchAttention(layers, BLOCK), TorchAttention(layers, BLOCK, chunk_bytes)
    for each in (whole, cut):
        each.prepare(kv, known)
    for layer in range(len(LAYERS)):
        q = torch.randn(4, BLOCK, HEADS, HEAD_DIM)
        k, v = torch.randn(2, 4, BLOCK, KV_HEADS, HEAD_DIM)
        got, expected = cut.attend(layer, q, k, v), whole.attend(layer, q, k, v)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_a_request_that_sees_nothing_live_sees_its_block() -> None:
    dead = ContextTable(torch.full((1, 40), -1, dtype=torch.int32), torch.tensor([40]))
    kv = torch.randn(ENTRIES + 1, 1, 2, KV_HEADS, HEAD_DIM)
    q = torch.randn(1, BLOCK, HEADS, HEAD_DIM)
    k, v = torch.randn(2, 1, BLOCK, KV_HEADS, HEAD_DIM)
    results = []
    for chunk_bytes, known in ((1, dead), (1 << 20, dead._replace(entries=dead.entries[:, :0]))):
        attention = TorchAttention(LAYERS[:1], BLOCK, chunk_bytes)
        attention.prepare(kv, known)
        results.append(attention.attend(0, q, k, v))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def peak_bytes(run: Any) -> int:
    """Most bytes that torch's CPU allocator hands out beyond those at the start."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert most > 0
    return most


@pytest.mark.parametrize("window", [None, 4000], ids=["direct", "ring"])
def test_memory_of_a_proposal_does_not_grow_with_the_context(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 4 bytes for each entry of the table, and one chunk."""
    monkeypatch.setattr("sglang_dflash.drafting.attention.table.PIECE", 1 << 10)
    raw = raw_config(
        num_key_value_heads=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=1500,
    )
    model = random_model(raw).freeze()
    config, requests, chunk = model.config, 2, 1 << 18
    options, embed = Options(window=window).resolve(config), torch.randn(64, 32)
    peaks = {}
    for context in (2000, 4000):
        slots = torch.arange(requests * context, dtype=torch.int32).view(requests, context)
        groups = kv_groups(
            model, options, slots.numel(), slots.numel(),
            attention=lambda of: TorchAttention(of.attentions, options.draft_block, chunk),
        )  # fmt: skip
        for group in groups:
            kv = torch.randn(slots.numel(), *group.cache.kv.shape[1:])
            write_kv(group.cache, slots.flatten().long(), kv)
        head = TargetHead(lambda ids: embed[ids], lambda hidden: hidden @ embed.T)
        drafter = Drafter(model, head, groups, options)
        lengths = torch.full((requests,), context)
        known = RequestSlots(slots, torch.arange(requests), lengths, context)
        with torch.inference_mode():
            peaks[context] = peak_bytes(partial(drafter.propose, torch.tensor([1, 2]), known))
    table_bytes = 4 * requests * 2000
    assert peaks[4000] - peaks[2000] <= table_bytes + 4096
    assert peaks[4000] <= 2 * table_bytes + 1.5 * chunk


def test_the_default_is_one_copy_of_a_small_batch() -> None:
    """Many small launches would cost more than they save."""
    config = random_model(raw_config()).config
    attention: Any = TorchAttention(config.layers, 4)
    kv = torch.randn(ENTRIES + 1, 3, 2, 2, 16)
    attention.prepare(kv, table([30, 0, 5, 17], Reach()))
    copies = []
    select = torch.index_select

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is select:
                copies.append(func)
            return func(*args, **(kwargs or {}))

    q, own = torch.randn(4, 4, 4, 16), torch.randn(4, 4, 2, 16)
    with Counting():
        for layer in range(3):
            attention.attend(layer, q, own, own)
    assert len(copies) == 3
