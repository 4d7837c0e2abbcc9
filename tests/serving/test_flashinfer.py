"""FlashInfer as draft attention calls it, without a GPU: its own wrapper checks the call and hands
it to a plain kernel in place of the compiled one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafting.attention.backend import Setting
from sglang_dflash.drafting.attention.paged import PagedAttention, Pages
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.facts.draft_config import DraftConfig, LayerAttention
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.gpu import flashinfer_attention
from sglang_dflash.serving.gpu.flashinfer_attention import FlashInferKernel, page_lists
from tests.conftest import raw_config
from tests.drafting.test_paged_attention import LAYERS, plain_kernel

prefill = pytest.importorskip("flashinfer.prefill")

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
ENTRIES = 60
FULL, CAUSAL = 0, 1


class Compiled:
    """In place of FlashInfer's compiled module: `plan` and `paged_run` as it has them.

    A plan knows lengths from the host, a run reads them from the device's lists.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.plans = arguments, 0

    def plan(self, *given: Any) -> dict[str, Any]:
        (_, _, _, queries, begins, lengths, rows, requests, heads, kv_heads, page, graph, head_dim,
         head_dim_vo, causal, left, *_) = given  # fmt: skip
        assert queries.device.type == begins.device.type == lengths.device.type == "cpu"
        assert (rows, requests) == (int(queries[-1]), len(queries) - 1) and not graph
        assert (heads, kv_heads, page, head_dim, head_dim_vo) == (HEADS, KV_HEADS, 1, 8, 8)
        assert lengths.equal(begins.diff())
        self.plans += 1
        return {"causal": causal, "left": left, "lengths": lengths}

    def paged_run(self, *given: Any) -> None:
        _, _, planned, q, k, v, queries, begins, entries, last, out, _, mask, layout, left = given[
            :15
        ]
        assert layout == 0 and last.tolist() == [1] * len(last)
        assert planned["left"] == left and planned["causal"] == (mask == CAUSAL)
        lengths = begins.diff()
        assert lengths.equal(planned["lengths"])
        table = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int32)
        for r, length in enumerate(lengths.tolist()):
            table[r, :length] = entries[begins[r] : begins[r + 1]]
        # Its variants.cuh: a query sees kv_idx + qo_len + window_left >= kv_len + qo_idx.
        layer = LayerAttention(None if left < 0 else left + 1, mask == CAUSAL)
        pages = Pages(table, lengths, queries)
        out.copy_(plain_kernel(q, k, v, pages, int(queries.diff().max()), layer))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """The modules that its wrappers ask for."""
    made: list[Compiled] = []
    empty = torch.empty

    def compiled(backend: str, *arguments: Any) -> Compiled:
        assert backend == "fa2"
        made.append(Compiled(arguments))
        return made[-1]

    def unpinned(*shape: Any, pin_memory: bool = False, **others: Any) -> Tensor:
        return empty(*shape, **others)

    monkeypatch.setattr(prefill, "get_batch_prefill_module", compiled)
    monkeypatch.setattr(prefill, "device_support_pdl", lambda _: False)
    monkeypatch.setattr(torch, "empty", unpinned)
    return made


def kernel(layers: tuple[LayerAttention, ...] = LAYERS) -> FlashInferKernel:
    space = torch.empty(1 << 20, dtype=torch.uint8)
    return FlashInferKernel(
        layers, lambda: prefill.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
    )


def compare(attention: PagedAttention, entries: Tensor, lengths: list[int]) -> None:
    requests = len(lengths)
    kv = torch.randn(ENTRIES + 1 + 4 * BLOCK, len(LAYERS), 2, KV_HEADS, HEAD_DIM)
    table = ContextTable(entries, torch.tensor(lengths))
    reference = TorchAttention(LAYERS, BLOCK)
    for one in (attention, reference):
        one.prepare(kv, table)
    qkv = torch.randn(requests, BLOCK, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    for layer in range(len(LAYERS)):
        got, expected = attention.attend(layer, q, k, v), reference.attend(layer, q, k, v)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def ragged(lengths: list[int]) -> Tensor:
    entries = torch.full((len(lengths), max(lengths, default=2)), -1, dtype=torch.int32)
    for r, n in enumerate(lengths):
        entries[r, :n] = torch.randperm(ENTRIES)[:n]
    return entries


def test_it_is_the_reference(modules: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of layer, over steps of different batches; a request without context."""
    # Their dtype is float32 here, which no kernel of FlashInfer's has.
    attention = PagedAttention(LAYERS, BLOCK, ENTRIES + 1, kernel())
    for lengths in ([14, 0, 5], [3], [], [30, 1, 1, 20]):
        compare(attention, ragged(lengths), lengths)
    # A plan per step and kind of layer: three steps had requests.
    assert [module.plans for module in modules] == [1] * 3 * len(LAYERS)
    windows = {module.arguments[7] for module in modules}
    assert windows == {False, True}


def test_a_plan_serves_all_layers_of_its_kind(modules: list[Compiled]) -> None:
    layers = (LAYERS[0], LAYERS[1], LAYERS[0], LAYERS[0])
    attention = PagedAttention(layers, BLOCK, ENTRIES + 1, kernel(layers))
    kv = torch.randn(ENTRIES + 1 + BLOCK, len(layers), 2, KV_HEADS, HEAD_DIM)
    q, k = torch.randn(1, BLOCK, HEADS, HEAD_DIM), torch.randn(1, BLOCK, KV_HEADS, HEAD_DIM)
    for steps in (1, 2):
        attention.prepare(kv, ContextTable(ragged([9]), torch.tensor([9])))
        for layer in range(len(layers)):
            attention.attend(layer, q, k, k)
        assert sum(module.plans for module in modules) == 2 * steps


def test_lists_of_pages() -> None:
    table = torch.tensor([[5, 7, 50, 51], [52, 53, 0, 0]], dtype=torch.int32)
    pages = Pages(table, torch.tensor([4, 2], dtype=torch.int32), torch.tensor([0, 2, 4]))
    queries, begins, entries, last = page_lists(pages, 2)
    assert queries.tolist() == [0, 2, 4] and begins.tolist() == [0, 4, 6]
    assert entries.tolist() == [5, 7, 50, 51, 52, 53] and last.tolist() == [1, 1]
    assert {x.dtype for x in (queries, begins, entries, last)} == {torch.int32}


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    message = "'flashinfer'; it has kernels for GPUs from capability 8 on, this one's is 7"
    with pytest.raises(ConfigError, match=message):
        flashinfer_attention.flashinfer(
            DraftConfig.from_dict(raw_config()), Setting(4, torch.device("cuda"), ())
        )


def test_its_wrapper_is_made_as_it_takes_it(
    modules: list[Compiled], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By `flashinfer`, as for a server; a warning says what it costs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1 << 16)
    setting = Setting(BLOCK, torch.device("cpu"), LAYERS, scratch=61)
    config = DraftConfig.from_dict(raw_config())
    attention = flashinfer_attention.flashinfer(config, setting)
    assert "every step waits for the device" in caplog.text
    compare(attention, ragged([4, 9]), [4, 9])
