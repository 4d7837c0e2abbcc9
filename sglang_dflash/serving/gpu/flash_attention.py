"""FlashAttention 3 and 4, as SGLang ships them, for `drafting.attention.paged`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import LayerAttention
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.backend import AttentionSizes
from sglang_dflash.drafting.attention.paged import PagedAttention, PagedKernel, Pages
from sglang_dflash.drafting.attention.visibility import keys_around

# Major compute capability -> splits of a request's context, 0 for as many as FA4 finds best. On
# Hopper it has one only.
FA4_SPLITS = {9: 1, 10: 0}
# The kernels that sgl-kernel is built with.
FA3_MAJORS = (8, 9)


def fa4(sizes: AttentionSizes) -> PagedAttention:
    """FA4. Raises ConfigError if this GPU has no kernel, or the package is missing."""
    major = _served_major("fa4", FA4_SPLITS, sizes.device)
    return _paged(sizes, fa4_kernel(FA4_SPLITS[major]))


def fa3(sizes: AttentionSizes) -> PagedAttention:
    """FA3. Raises ConfigError if this GPU has no kernel."""
    _served_major("fa3", FA3_MAJORS, sizes.device)
    return _paged(sizes, fa3_kernel())


def _served_major(name: str, majors: Collection[int], device: torch.device) -> int:
    """Return the GPU's major compute capability. Raises ConfigError if it is none of these."""
    major = torch.cuda.get_device_capability(device)[0]
    if major not in majors:
        raise ConfigError(
            "attention",
            name,
            f"it has kernels for GPUs of capability {' and '.join(map(str, majors))}, this one's "
            f"is {major}; choose one of ['triton', 'torch']",
        )
    return major


def _paged(sizes: AttentionSizes, kernel: PagedKernel) -> PagedAttention:
    return PagedAttention(sizes.layers, sizes.load.draft_block, sizes.scratch, kernel, sizes.holes)


def fa4_kernel(splits: int) -> Any:
    """A `PagedKernel`. Raises ConfigError if FA4 cannot be imported."""
    from sglang.kernels.ops.attention import flash_attention_v4

    if not flash_attention_v4.is_flash_attention_v4_available():
        raise ConfigError("attention", "fa4", "the package flash-attn-4 cannot be imported")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pages: Pages, block: int, layer: LayerAttention
    ) -> Tensor:
        return flash_attention_v4.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=pages.queries,
            max_seqlen_q=block,
            seqused_k=pages.lengths,
            page_table=pages.table,
            # On the host, and no less than any request has: FA4 chooses its splits by it.
            max_seqlen_k=pages.table.shape[1],
            causal=layer.causal and layer.sliding_window is None,
            window_size=keys_around(layer),
            num_splits=splits,
        )

    return attend


def fa3_kernel() -> Any:
    """A `PagedKernel`."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pages: Pages, block: int, layer: LayerAttention
    ) -> Tensor:
        left, right = keys_around(layer)
        return flash_attn_with_kvcache(
            q,
            k,
            v,
            page_table=pages.table,
            cache_seqlens=pages.lengths,
            cu_seqlens_q=pages.queries,
            max_seqlen_q=block,
            causal=layer.causal,
            window_size=(-1 if left is None else left, -1 if right is None else right),
            num_splits=0,
        )

    return attend
