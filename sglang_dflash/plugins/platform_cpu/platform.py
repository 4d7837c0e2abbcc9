"""The platform object, which tells SGLang what differs on a plain CPU.

SGLang constructs it while its own utilities are still being imported. This module may therefore
import SGLang's platform interface only; the methods import everything else.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from torch.profiler import ProfilerActivity

from sglang_dflash.plugins.platform_cpu import ATTENTION_BACKEND, OVERLAP


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without accelerator: torch kernels only, no Triton, no graphs."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = None) -> str:
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the defaults that SGLang has no flag for.

        An idle scheduler sleeps (`--sleep-on-idle`): polling would take a whole core. Steps do not
        overlap (`--disable-overlap-schedule`): the scheduler waits while a CPU computes a step, so
        overlap would only send each token a step later and run an extra step per request.
        """
        server_args.sleep_on_idle = True
        if os.environ.get(OVERLAP) != "1":
            server_args.disable_overlap_schedule = True

    def init_backend(self) -> None:
        # SGLang's `torch_native` backend knows neither target verify nor a draft's block. Ours
        # takes its name, because SGLang treats `torch_native` as "no Triton here" in many places.
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_dflash.plugins.platform_cpu import layers
        from sglang_dflash.plugins.platform_cpu.attention import CpuAttentionBackend

        register_attention_backend(ATTENTION_BACKEND)(CpuAttentionBackend)
        layers.register(self.get_dispatch_key_name())

    def post_load_model(self, model: Any) -> None:
        from sglang.srt.runtime_context import get_model

        from sglang_dflash.plugins.platform_cpu.linear import pack_model

        pack_model(model, str(get_model().dtype))

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang.srt.kv_canary.pool_patcher.adapters.mha import attach_mha
        from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher

        from sglang_dflash.plugins.platform_cpu.attention import CpuKVPool

        # SGLang's KV canary looks a pool up by its class, and this is a subclass of SGLang's.
        register_pool_attacher(CpuKVPool, attach_mha)
        return CpuKVPool

    def get_speculative_cache_locs_fn(self) -> Any:
        from sglang_dflash.plugins.platform_cpu.attention import speculative_cache_locs

        return speculative_cache_locs

    def get_torch_profiler_activity_str(self) -> str:
        return self.get_torch_profiler_activity().name

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU
