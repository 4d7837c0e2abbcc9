"""FlashAttention 3 and 4 as draft attention calls them, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention
from sglang_dflash.drafting.attention.backend import AttentionSizes
from sglang_dflash.drafting.attention.capabilities import AttentionLoad
from sglang_dflash.drafting.attention.paged import Pages
from sglang_dflash.drafting.attention.visibility import keys_around
from sglang_dflash.serving.gpu import flash_attention
from tests.conftest import raw_config
from tests.errors import refused
from tests.kernels.compile_flash_attention import kinds
from tests.kernels.support import run


@pytest.mark.compile
@pytest.mark.parametrize("capability", [90, 100])
def test_fa4_compiles_for_every_kind_of_layer(capability: int) -> None:
    printed = run("-m", "tests.kernels.compile_flash_attention", str(capability))
    assert json.loads(printed.splitlines()[-1]) == list(kinds())


CALL = """
import torch
from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.serving.gpu.flash_attention import fa3_kernel
layers = [LayerAttention(None, False), LayerAttention(None, True), LayerAttention(9, True)]
with torch.device("meta"):
    attention = PagedAttention(layers, 4, 100, fa3_kernel())
    entries = torch.empty(2, 30, dtype=torch.int32)
    kv = torch.empty(108, 3, 2, 2, 64, dtype=torch.bfloat16)
    attention.prepare(kv, ContextTable(entries, torch.empty(2, dtype=torch.int64)))
    q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16)
    for layer in range(3):
        try:
            attention.attend(layer, q, q[:, :, :2], q[:, :, :2])
        except NotImplementedError as error:
            print(str(error).splitlines()[0])
"""


def stub_driver(folder: Path) -> None:
    """A libcuda.so.1 with all functions of the driver that sgl-kernel's libraries may name."""
    spec = importlib.util.find_spec("sgl_kernel")
    places = (spec and spec.submodule_search_locations) or []
    libraries = [library for place in places for library in Path(place).rglob("*.so")]
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", *libraries], check=True, capture_output=True
    )
    names = set(re.findall(r" U (cu[A-Z]\w+)$", listed.stdout.decode(), re.M))
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)


@pytest.mark.compile
@pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is None
    or not (shutil.which("cc") and shutil.which("nm")),
    reason="needs sgl-kernel, and cc and nm for a stub of the CUDA driver",
)
def test_fa3_takes_our_call(tmp_path: Path) -> None:
    """Its schema: the call gets as far as looking for a kernel for tensors without memory."""
    stub_driver(tmp_path)
    printed = run("-c", CALL, LD_LIBRARY_PATH=str(tmp_path)).splitlines()
    assert len(printed) == 3
    for line in printed:
        assert line.startswith("sgl_kernel::fwd: attempted to run this operator with Meta tensors")


@pytest.mark.parametrize(("major", "splits"), [(9, 1), (10, 18)])
def test_fa4_chooses_its_splits(major: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request with 8 KV heads on 148 multiprocessors, as FA4 then computes them: four splits
    would leave most of them idle."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    from sglang.kernels.ops.attention import flash_attention_v4

    given: dict[str, Any] = {}
    monkeypatch.setattr(
        flash_attention_v4, "flash_attn_varlen_func", lambda *_, **kwargs: given.update(kwargs)
    )
    monkeypatch.setattr(flash_attention_v4, "is_flash_attention_v4_available", lambda: True)
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "148")
    pages = Pages(torch.zeros(1, 4096), torch.zeros(1), torch.zeros(2))
    kernel = flash_attention.fa4_kernel(flash_attention.FA4_SPLITS[major])
    q = torch.zeros(16, 32, 128)
    kernel(q, q, q, pages, 16, LayerAttention(None, False))
    assert given["max_seqlen_k"] == 4096 and (given["num_splits"] == 1) == (major == 9)
    chosen = interface._get_fwd_config(
        arch=10 * major, head_dim=128, head_dim_v=128, max_seqlen_q=16,
        max_seqlen_k=given["max_seqlen_k"], num_head_kv=8, qhead_per_kvhead=4, pack_gqa=True,
        batch_size=1, causal=False, local=False, window_size_left=None, window_size_right=None,
        num_splits=given["num_splits"], device=torch.device("cpu"),
    )  # fmt: skip
    assert chosen.num_splits == splits


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (LayerAttention(None, False), (None, None)),
        (LayerAttention(None, True), (None, None)),
        (LayerAttention(2048, True), (2047, 0)),
        (LayerAttention(2048, False), (2047, None)),
    ],
    ids=str,
)
def test_windows(layer: LayerAttention, expected: tuple[int | None, int | None]) -> None:
    assert keys_around(layer) == expected


@pytest.mark.parametrize(("name", "majors"), [("fa3", "8 and 9"), ("fa4", "9 and 10")])
def test_another_generation_is_refused(
    name: str, majors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    load = AttentionLoad(DraftConfig.from_dict(raw_config()), 4, 1, 1, processors=132)
    with refused("attention", name, reason=majors):
        getattr(flash_attention, name)(AttentionSizes(load, torch.device("cuda"), ()))
