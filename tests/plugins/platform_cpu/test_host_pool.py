"""SGLang's hierarchical cache on a plain CPU: it fails without our patches, and ours copies."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.plugins.platform_cpu import host_pool, torch_ops
from tests.patches.originals import original

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the platform serves machines without an accelerator"
)


def test_host_memory_is_registered_with_cuda() -> None:
    register = original("sglang.srt.mem_cache.pool_host.common._cuda_host_register")
    buffer = torch.zeros(4)
    with pytest.raises((RuntimeError, AssertionError, ModuleNotFoundError), match=r"CUDA|driver"):
        register(buffer)
    host_pool.skip_registration(buffer)


def test_ten_gib_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 4 << 30)
    for reserve, left in ((10 << 30, -6 << 30), (host_pool.RESERVE, 3 << 30)):
        monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", reserve)
        assert base.host_memory_budget_bytes() == left


def hosted(layout: str) -> SimpleNamespace:
    """A host pool of 6 tokens in pages of 2, of two layers, beside a device pool of 4; both with
    K and V, and with latents."""
    kept = torch.zeros(2, 2, *((3, 2) if layout == "page_first_direct" else (6,)), 1, 3)
    latents = torch.zeros(kept.shape[1:])
    return SimpleNamespace(
        _is_dummy=False,
        _layer_shard_enabled=False,
        dcp_size=1,
        dcp_rank=0,
        device_kv_buffers=tuple(torch.rand(2, 4, 1, 3)),
        device_data_ptrs=None,
        data_refs=None,
        kv_buffer=latents if layout == "layer_first" else latents.transpose(0, 1),
        # Numbers of SGLang's, in another order than the buffers.
        _target_layer_indices=(5, 3),
        _buffer_index_by_layer={5: 0, 3: 1},
        _host_layer_by_controller={5: 0, 3: 1},
        layout=layout,
        page_size=2,
        target_layer_num=2,
        device_k_data_ptrs=None,
        device_v_data_ptrs=None,
        layer_num=2,
        device_k_buffers=tuple(torch.rand(2, 4, 1, 3)),
        device_v_buffers=tuple(torch.rand(2, 4, 1, 3)),
        k_buffer=kept[0],
        v_buffer=kept[1],
        k_data_refs=list(kept[0]),
        v_data_refs=list(kept[1]),
        host_kv_data_refs=[*kept[0], *kept[1]],
        _require_packed_device_rows=lambda _kernel: None,
    )


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("pool", ["mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost"])
def test_host_copies_need_kernels(pool: str, layout: str) -> None:
    """Ours need none: tokens that were backed up are loaded into other slots."""
    host, at, slots = hosted(layout), torch.tensor([5, 2, 0]), torch.tensor([1, 3, 0])
    there = torch.tensor([0, 2, 1])
    back_up, load = host_pool.back_up, host_pool.load_layer
    buffers, numbers = (*host.device_k_buffers, *host.device_v_buffers), (0, 1)
    if pool.startswith("mla"):
        back_up, load = host_pool.back_up_latents, host_pool.load_latent_layer
        buffers, numbers = host.device_kv_buffers, host._target_layer_indices
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("backup_from_device_all_layer", back_up, (at, slots)),
        *(("load_to_device_per_layer", load, (at, there, n)) for n in numbers),
    ]
    before = [layer[slots].clone() for layer in buffers]
    for name, ours, arguments in calls:
        with pytest.raises(NameError, match="transfer_kv"):
            original(f"sglang.srt.mem_cache.pool_host.{pool}.{name}")(
                host, None, *arguments, "direct"
            )
        ours(host, None, *arguments, "direct")
    for layer, rows in zip(buffers, before, strict=True):
        assert layer[there].equal(rows)


def test_host_copies_of_states_need_kernels() -> None:
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    host: Any = object.__new__(MambaPoolHost)
    host.layout, host.num_mamba_layers, host.temporal_state_elem_size = "page_first_direct", 2, 3
    host.conv_state_shapes, host.mtp_draft_buffer_infos = [], ()
    host.buffer_info = SimpleNamespace(temporal=torch.rand(2, 4, 3), conv=[])
    host.temporal_buffer = torch.zeros(6, 2, 1, 3)
    host.temporal_staging_buffer = host.temporal_device_ptrs = None
    host._temporal_can_use_jit = False
    at, slots, there = torch.tensor([5, 2]), torch.tensor([1, 3]), torch.tensor([0, 2])
    before = host.buffer_info.temporal[:, slots].clone()
    back_up = original(f"{MambaPoolHost.__module__}.MambaPoolHost.backup_from_device_all_layer")
    load = original(f"{MambaPoolHost.__module__}.MambaPoolHost.load_to_device_per_layer")
    with pytest.raises(NameError, match="transfer_kv"):
        back_up(host, None, at, slots, "direct")
    host_pool.copy_states(back_up, host, None, at, slots, "direct")
    for layer in range(2):
        with pytest.raises(NameError, match="transfer_kv"):
            load(host, None, at, there, layer, "direct")
        host_pool.copy_states(load, host, None, at, there, layer, io_backend="direct")
    assert host.buffer_info.temporal[:, there].equal(before)


@pytest.mark.parametrize(
    "pool", ["mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost", "mamba.MambaPoolHost"]
)
def test_pages_from_storage_need_pinned_memory(pool: str) -> None:
    page = original(f"sglang.srt.mem_cache.pool_host.{pool}.get_dummy_flat_data_page")
    host = SimpleNamespace(
        layer_num=2, page_size=2, head_num=1, head_dim=3, kv_cache_dim=6, size_per_token=12,
        dtype=torch.float32, device="cpu", pin_memory=True,
    )  # fmt: skip
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|driver|pin"):
        page(host)
    assert torch_ops.call_without_pinning(page, host).numel() == 24
