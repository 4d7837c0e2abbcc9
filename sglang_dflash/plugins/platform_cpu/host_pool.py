"""SGLang's hierarchical cache on a plain CPU: torch copies between device and host pool instead of
kernels, and host memory that is not pinned.

The io backend has no effect here. Indices are int64 `[N]`.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

# Bytes of host memory that the hierarchical cache leaves free.
RESERVE = 1 << 30


def skip_registration(buffer: Tensor, registration_granularity_bytes: int | None = None) -> None:
    """In place of `_cuda_host_register`: there is no device to register memory with."""


def load_layer(
    host: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """In place of `MHATokenToKVPoolHost.load_to_device_per_layer`."""
    del device_pool, io_backend
    if is_draft or 0 <= layer_id < host.target_layer_num:
        host_places = _places(host, host_indices)
        host.device_k_buffers[layer_id][device_indices] = host.k_data_refs[layer_id][host_places]
        host.device_v_buffers[layer_id][device_indices] = host.v_data_refs[layer_id][host_places]


def back_up(
    host: Any, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
) -> None:
    """In place of `MHATokenToKVPoolHost.backup_from_device_all_layer`."""
    del device_pool, io_backend
    host_places = _places(host, host_indices)
    buffers = (*host.device_k_buffers, *host.device_v_buffers)
    for layer, host_layer in zip(buffers, (*host.k_data_refs, *host.v_data_refs), strict=True):
        host_layer[host_places] = layer[device_indices]


def load_latent_layer(
    host: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """In place of `MLATokenToKVPoolHost.load_to_device_per_layer`."""
    del device_pool, io_backend
    if is_draft or layer_id in host._target_layer_indices:
        layer = host.device_kv_buffers[host._buffer_index_by_layer[layer_id]]
        host_layer = _latents(host)[host._host_layer_by_controller[layer_id]]
        layer[device_indices] = host_layer[_places(host, host_indices)]


def back_up_latents(
    host: Any, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
) -> None:
    """In place of `MLATokenToKVPoolHost.backup_from_device_all_layer`."""
    del device_pool, io_backend
    host_places = _places(host, host_indices)
    for layer, host_layer in zip(host.device_kv_buffers, _latents(host), strict=True):
        host_layer[host_places] = layer[device_indices]


def _latents(host: Any) -> Tensor:
    """The host pool by layer. In all layouts but one, pages or tokens come first."""
    return host.kv_buffer if host.layout == "layer_first" else host.kv_buffer.transpose(0, 1)


def _places(host: Any, indices: Tensor) -> tuple[Tensor, ...]:
    """Return the index of tokens in a layer of the host pool. In one layout pages are an axis."""
    if host.layout == "page_first_direct":
        return indices // host.page_size, indices % host.page_size
    return (indices,)


def copy_states(original: Any, *args: Any, **named: Any) -> None:
    """Around both copies of `MambaPoolHost`: use the io backend that falls back to torch."""
    bound = inspect.signature(original).bind(*args, **named)
    bound.arguments["io_backend"] = "kernel_ascend"
    original(*bound.args, **bound.kwargs)
