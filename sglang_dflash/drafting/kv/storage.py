"""How draft K/V is stored."""

from __future__ import annotations

import torch
from torch import Tensor


def store_(cache: Tensor, entries: Tensor, kv: Tensor) -> None:
    """Write K/V into entries of a cache, in its dtype.

    8-bit floats saturate: a cast may make NaN or infinity of what is out of their range, which
    would reach every request that reads the entry.

    Args:
        cache: `[S, L, 2, G, D]`.
        entries: int64 `[N]`.
        kv: `[N, L, 2, G, D]`, any float dtype.
    """
    if cache.dtype.itemsize > 1:
        cache[entries] = kv.to(cache.dtype)
        return
    limit = torch.finfo(cache.dtype).max
    stored = kv.clamp(-limit, limit).to(cache.dtype)
    # Not every device can index 8-bit floats.
    cache.view(torch.uint8)[entries] = stored.view(torch.uint8)
