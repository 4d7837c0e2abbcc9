"""The backend `triton` against `torch`, through the interface that the drafter uses."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels.draft_attention import Limits, TritonAttention, backends

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention
from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.core.attention.backend import make_attention
from sglang_dflash.core.attention.reference import TorchAttention
from sglang_dflash.core.attention.table import ContextTable
from sglang_dflash.core.attention.visibility import context_positions
from sglang_dflash.core.options import ContextWindow
from sglang_dflash.core.parallel import TensorParallel
from tests.conftest import raw_config
from tests.kernels.support import DEVICE

LAYERS = (LayerAttention(None, False), LayerAttention(9, True))
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 3


@pytest.mark.parametrize("window", [None, ContextWindow(12, 2)], ids=["whole", "window"])
def test_it_is_the_reference(window: ContextWindow | None) -> None:
    """Over steps of different batches and tables, with one workspace."""
    limits = Limits(requests=4, columns=600, processors=8)
    rows = BLOCK * HEADS // KV_HEADS
    ours = TritonAttention(LAYERS, window, limits, KV_HEADS, rows, HEAD_DIM, DEVICE)
    reference = TorchAttention(LAYERS, BLOCK)
    # At most, 3 requests of 2 kv heads with 2 splits each.
    assert ours.workspace_bytes == 12 * rows * (HEAD_DIM + 1) * 4
    kv = torch.randn(700, len(LAYERS), 2, KV_HEADS, HEAD_DIM, device=DEVICE)
    for lengths in ([590], [5, 0], [300, 1, 20, 7], []):
        seq_lens = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
        width = max([*lengths, 1]) if window is None else window.size
        positions = context_positions(seq_lens, width, window)
        entries = torch.randint(700, (len(lengths), width), device=DEVICE)
        live = (torch.rand(entries.shape, device=DEVICE) < 0.7) & (positions < seq_lens[:, None])
        table = ContextTable(entries, live, positions, seq_lens)
        qkv = torch.randn(len(lengths), BLOCK, HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        ours.prepare(kv, table)
        reference.prepare(kv, table)
        for layer in range(len(LAYERS)):
            got, expected = ours.attend(layer, q, k, v), reference.attend(layer, q, k, v)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_it_is_a_row_of_the_table_and_for_cuda_only() -> None:
    config = DraftConfig.from_dict(raw_config())
    table = backends(None, Limits(2, 64, 132), TensorParallel(), "cpu")
    with pytest.raises(ConfigError, match=r"'triton' runs on cuda, not on cpu.*\['torch'\]"):
        make_attention("triton", config, 4, torch.device("cpu"), table)
    made = make_attention("triton", config, 4, torch.device("cuda"), table)
    assert isinstance(made, TritonAttention)
    with pytest.raises(ConfigError, match=r"head dim 16, 32, 64, 128, 256, the draft's is 80"):
        wide = DraftConfig.from_dict(raw_config(head_dim=80))
        make_attention("triton", wide, 4, torch.device("cuda"), table)
