"""The backend `triton` against `torch`, through the interface that the drafter uses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_kernels.draft_attention import TritonAttention

from sglang_dflash.checkpoint.draft_config import DraftConfig, Reach
from sglang_dflash.drafting.attention.backend import AttentionSizes
from sglang_dflash.drafting.attention.capabilities import AttentionLoad, choose_splits, split_shape
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.drafting.attention.visibility import context_positions
from tests.conftest import raw_config
from tests.kernels.support import DEVICE

LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 9,
}
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 3


def test_long_contexts_are_split_in_large_batches_too() -> None:
    """Beside short ones, which are not."""
    assert choose_splits(64, 8, 262_144, processors=132) == (1, 8)
    assert choose_splits(64, 8, 32_768, processors=132) == (1, 1)
    assert choose_splits(1, 8, 262_144, processors=132) == (17, 17)


@pytest.mark.parametrize("reach", [Reach(), Reach(12, 2)], ids=["whole", "window"])
def test_it_is_the_reference(reach: Reach) -> None:
    """Over steps of different batches and tables, with one workspace."""
    config = DraftConfig.from_dict(raw_config(**LAYERS))
    # A sliding layer may read more than its window: what it does not see is masked.
    layers = tuple(replace(layer, reach=reach) for layer in config.layers)
    load = AttentionLoad(config, BLOCK, requests=4, columns=600, processors=8)
    rows = BLOCK * HEADS // KV_HEADS
    ours = TritonAttention(AttentionSizes(load, torch.device(DEVICE), layers))
    reference = TorchAttention(layers, BLOCK)
    # At most, 3 requests of 2 kv heads with 2 splits each.
    assert split_shape(load) == (12, rows, HEAD_DIM)
    kv = torch.randn(700, 2, 2, KV_HEADS, HEAD_DIM, device=DEVICE)
    for lengths in ([590], [5, 0], [300, 1, 20, 7], []):
        seq_lens = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
        width = 14 if reach.is_bounded else max([*lengths, 1])
        positions = context_positions(seq_lens, width, reach)
        entries = torch.randint(700, (len(lengths), width), device=DEVICE)
        live = (torch.rand(entries.shape, device=DEVICE) < 0.7) & (positions < seq_lens[:, None])
        table = ContextTable(entries.where(live, -1).int(), seq_lens)
        qkv = torch.randn(len(lengths), BLOCK, HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        ours.prepare(kv, table)
        reference.prepare(kv, table)
        for layer in range(2):
            got, expected = ours.attend(layer, q, k, v), reference.attend(layer, q, k, v)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
