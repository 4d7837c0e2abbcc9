"""KV slots on a plain CPU: SGLang's pool and slot lookup, with indexing in place of Triton."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class CpuKVPool(MHATokenToKVPool):
    """The engine's MHA pool with moves done by indexing instead of a Triton copy."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """KV slots of every request's next positions, int64 `[batch_size * draft_token_num]`."""
    positions = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], positions].long().flatten()
