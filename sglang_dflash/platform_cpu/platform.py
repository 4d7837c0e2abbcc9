"""The platform object that SGLang asks for what differs on a plain CPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

ATTENTION_BACKEND = "torch_native"


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without accelerator: torch kernels only, no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, device_id: int | None = None) -> str:
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if server_args.attention_backend is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"

    def init_backend(self) -> None:
        # SGLang's `torch_native` backend knows neither target verify nor a draft's block; ours takes its name, so that
        # every place in SGLang that treats `torch_native` as "no Triton here" does the right thing.
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_dflash.platform_cpu.attention import CpuAttentionBackend

        register_attention_backend(ATTENTION_BACKEND)(CpuAttentionBackend)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        return CpuKVPool if kind == "mha" else None

    def get_speculative_cache_locs_fn(self) -> Any:
        return speculative_cache_locs

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


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
    """KV slots int64 `[batch_size * draft_token_num]` of the next `draft_token_num` positions of every request."""
    positions = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], positions].long().flatten()
