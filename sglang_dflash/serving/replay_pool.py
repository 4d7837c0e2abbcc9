"""Replay's side of SGLang: a recurrent state pool without snapshots, and GDN layers that verify without them.

Beside `compat` the only file that reaches into SGLang's own classes. Imported where replay serves, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.runtime_context import get_schedule, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

# (layer, a [R * B, HV], b [R * B, HV])
Record = Callable[[Any, Tensor, Tensor], None]


def install(record: Record) -> None:
    """Make this process's GDN layers verify without keeping the state after every token, and give `record` each layer's gate inputs.

    To be called before SGLang sizes and allocates the state pool.
    """
    extend, verify = GDNAttnBackend.forward_extend, GDNKernelDispatcher.target_verify
    budget = KVCacheConfigurator._handle_max_mamba_cache

    def forward_extend(
        self: Any,
        layer: Any,
        forward_batch: Any,
        mixed_qkv: Any,
        a: Tensor,
        b: Tensor,
        **kwargs: Any,
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            record(layer, a, b)
        return extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)

    def target_verify(self: Any, *args: Any, **kwargs: Any) -> Any:
        return verify(self, *args, **{**kwargs, "intermediate_states_buffer": None})

    def handle_max_mamba_cache(self: Any, total_rest_gb: float) -> float:
        # Without a speculative algorithm SGLang reserves nothing for snapshots.
        algorithm, self.spec_algorithm = self.spec_algorithm, SpeculativeAlgorithm.NONE
        try:
            return budget(self, total_rest_gb - replay_bytes(self) / 2**30)
        finally:
            self.spec_algorithm = algorithm

    GDNAttnBackend.forward_extend = forward_extend
    GDNKernelDispatcher.target_verify = target_verify
    KVCacheConfigurator._handle_max_mamba_cache = handle_max_mamba_cache
    HybridReqToTokenPool.mamba_pool_cls = ReplayPool


class ReplayPool(MambaPool):
    """SGLang's state pool with the convolution's windows and without the state's snapshots."""

    mamba_cache: Any

    def __init__(self, **kwargs: Any) -> None:
        # SGLang leaves the snapshots out for its own replay, which brings a ring: the smallest, and dropped at once.
        super().__init__(
            **{**kwargs, "enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": 1}
        )
        self.enable_linear_replayssm_spec = False
        self.replayssm_spec_write_pos = self.replayssm_cache_base = self.replayssm_is_flush = None
        cache = self.mamba_cache
        state, steps = cache.temporal, cache.intermediate_conv_window[0].shape[2]
        rings = {field.name: None for field in fields(cache) if field.name.startswith("replayssm_")}
        # The backend insists on a tensor of this shape; it has no memory of its own and nobody writes to it.
        nothing = state.new_zeros(()).expand(
            state.shape[0], kwargs["spec_state_size"] + 1, steps, *state.shape[2:]
        )
        self.mamba_cache = replace(cache, intermediate_ssm=nothing, **rings)


def replay_bytes(configurator: Any) -> int:
    """What replay needs beside the states: convolution inputs, the window before them and gate inputs of every running request."""
    params = configurator.mambaish_config.mamba2_cache_params
    block, requests = (
        get_spec().speculative_num_draft_tokens,
        get_schedule().max_running_requests // configurator.attn_dp_size + 1,
    )
    inputs = sum(math.prod(shape[:-1]) * (block + shape[-1] - 1) for shape in params.shape.conv)
    before = sum(math.prod(shape) for shape in params.shape.conv)
    gates = 2 * block * params.shape.temporal[0]
    return len(params.layers) * requests * (inputs + before + gates) * params.dtype.conv.itemsize
