"""FlashInfer's attention over pages, for `drafting.attention.paged`.

FlashInfer divides the work of a step on the host (its `plan`), from lengths that only the device
knows here: dead entries are left out. So every step waits for the device once, and cannot be
captured in a CUDA graph. That is why it is never chosen unasked.

Letters in shapes as in `drafting.attention.paged`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.backend import Setting
from sglang_dflash.drafting.attention.paged import PagedAttention, Pages
from sglang_dflash.drafting.attention.visibility import keys_around
from sglang_dflash.facts.draft_config import DraftConfig, LayerAttention
from sglang_dflash.facts.errors import ConfigError

logger = logging.getLogger(__name__)

# Its kernels of this name run on GPUs from capability 8.0 on and take any window, causal or not.
KERNELS = "fa2"
LEAST_MAJOR = 8
# What FlashInfer recommends for the parts of split requests. All kinds of layers share it.
WORKSPACE_BYTES = 128 << 20
# What each of its wrappers allocates for itself, on the device.
WRAPPER_BYTES = (8 << 20) + 4 * 32768


class PageLists(NamedTuple):
    """`Pages` as FlashInfer takes them; what its plan reads is on the host.

    Attributes:
        queries: int32 `[R + 1]` on the host, where each request's rows of q begin.
        begins: int32 `[R + 1]` on the host, where each request's entries begin.
        entries: int32 `[sum of lengths]` on the device.
        last: int32 `[R]` on the host, keys on each request's last page.
    """

    queries: Tensor
    begins: Tensor
    entries: Tensor
    last: Tensor


def page_lists(pages: Pages, block: int) -> PageLists:
    """Waits for the device: the number of keys decides shapes."""
    requests, device = len(pages.lengths), pages.table.device
    lengths = pages.lengths.cpu()
    begins = torch.zeros(requests + 1, dtype=torch.int32)
    begins[1:] = lengths.cumsum(0)
    total = int(begins[-1])
    there = begins[:-1].to(device, non_blocking=True)
    rows = torch.arange(requests, device=device)
    rows = rows.repeat_interleave(pages.lengths, output_size=total)
    columns = torch.arange(total, device=device) - there[rows]
    queries = block * torch.arange(requests + 1, dtype=torch.int32)
    return PageLists(queries, begins, pages.table[rows, columns], torch.ones_like(lengths))


class FlashInferKernel:
    """A `PagedKernel`. Plans once per step and kind of layer."""

    def __init__(self, kinds: Iterable[LayerAttention], wrapper: Callable[[], Any]) -> None:
        """`wrapper` makes a `BatchPrefillWithPagedKVCacheWrapper`: one for each kind."""
        self._wrappers = {kind: wrapper() for kind in dict.fromkeys(kinds)}
        self._planned: set[LayerAttention] = set()
        self._pages: Pages | None = None
        self._lists: PageLists | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Pages, block: int, layer: LayerAttention
    ) -> Tensor:
        if not len(q):
            return torch.empty_like(q)
        if self._pages is not pages or self._lists is None:
            self._pages, self._lists = pages, page_lists(pages, block)
            self._planned.clear()
        wrapper = self._wrappers[layer]
        if layer not in self._planned:
            self._plan(wrapper, q, k, layer, self._lists)
            self._planned.add(layer)
        return wrapper.run(q, (k, v))

    def _plan(
        self, wrapper: Any, q: Tensor, k: Tensor, layer: LayerAttention, lists: PageLists
    ) -> None:
        left, _ = keys_around(layer)
        wrapper.plan(
            *lists,
            num_qo_heads=q.shape[1],
            num_kv_heads=k.shape[2],
            head_dim_qk=q.shape[2],
            page_size=1,
            causal=layer.causal,
            window_left=-1 if left is None else left,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )


def workspace_bytes(_config: DraftConfig, setting: Setting) -> int:
    """What FlashInfer keeps on the device, with a wrapper for each kind of layer."""
    return WORKSPACE_BYTES + WRAPPER_BYTES * len(set(setting.layers))


def flashinfer(config: DraftConfig, setting: Setting) -> PagedAttention:
    """The backend for the GPU of `setting`. Raises ConfigError if this GPU has no kernel, or the
    package cannot be imported."""
    major = torch.cuda.get_device_capability(setting.device)[0]
    if major < LEAST_MAJOR:
        raise ConfigError(
            "attention",
            "flashinfer",
            f"it has kernels for GPUs from capability {LEAST_MAJOR} on, this one's is {major}; "
            "choose one of ['triton', 'torch']",
        )
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise ConfigError(
            "attention",
            "flashinfer",
            f"the package flashinfer-python cannot be imported ({error})",
        ) from error
    logger.warning(
        "DFLASH: draft attention on FlashInfer: every step waits for the device, because "
        "FlashInfer plans on the host, and draft steps run without CUDA graphs; triton does neither"
    )
    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setting.device)
    kernel = FlashInferKernel(
        setting.layers, lambda: BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=KERNELS)
    )
    return PagedAttention(setting.layers, setting.block_size, setting.scratch, kernel)
