"""Replay's side of SGLang: a recurrent state pool without snapshots that records verify inputs, and
the functions around SGLang's that write it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from torch import Tensor


class Recording:
    """Tensors that a verify forward saves for replay: gate inputs and the convolution's window
    before the block, of every layer and request. The convolution's inputs are in SGLang's own
    windows.

    Attributes:
        layers: layer index in the pool -> SGLang's layer.
        gates: `[2, L, R, verify_block, HV]`, the inputs a and b of the gates.
        windows: `[L, R, C, window - 1]`.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Any] = {}
        self.gates = self.windows = torch.empty(0)

    @property
    def nbytes(self) -> int:
        return self.gates.nbytes + self.windows.nbytes

    def record(
        self,
        pool: HybridReqToTokenPool,
        layer: Any,
        a: Tensor,
        b: Tensor,
        slots: Tensor,
        block: int,
    ) -> None:
        """Before a layer verifies; SGLang's convolution kernel overwrites its window.

        Args:
            pool: the target's request pool.
            layer: SGLang's layer.
            a, b: `[R * block, HV]`.
            slots: int `[R]`, the requests' state slots.
            block: tokens per request in this step, at most `verify_block`.
        """
        index = pool.mamba2_layer_index(layer.layer_id)
        conv = pool.mamba_pool.mamba_cache.conv[0]
        if not self.layers:
            depth, rows = len(conv), pool.size + 1
            # A step may verify less than a block; SGLang's own windows are for a whole one.
            most = pool.mamba_pool.mamba_cache.intermediate_conv_window[0].shape[2]
            self.gates = a.new_zeros(2, depth, rows, most, a.shape[-1])
            self.windows = conv.new_zeros(depth, rows, *conv.shape[2:])
        self.layers[index] = layer
        # Batches of warm-ups are padded beyond the pool; nothing of the padding is replayed.
        count = min(len(a) // block, self.gates.shape[2])
        if index == 0:
            # Of all layers at once: a layer overwrites its own window, and none does so before the
            # first. Copies, because a captured graph reuses the memory of its tensors. Padding has
            # slots of -1, and copies any window.
            sources = slots[:count].long().clamp(min=0)
            # Without a temporary of hundreds of MB, for which no memory is reserved.
            torch.index_select(conv, 1, sources, out=self.windows[:, :count])
        buffers = list(self.gates[:, index, :count, :block])
        torch._foreach_copy_(buffers, [gate.unflatten(0, (-1, block))[:count] for gate in (a, b)])


class ReplayPool(MambaPool):
    """SGLang's state pool with the convolution's windows and without the states' snapshots."""

    mamba_cache: Any

    def __init__(self, **kwargs: Any) -> None:
        # SGLang leaves the snapshots out for its own replay, which brings a ring: take the smallest
        # one and drop it.
        own_replay = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": 1}
        super().__init__(**{**kwargs, **own_replay})
        self.enable_linear_replayssm_spec = False
        self.replayssm_spec_write_pos = self.replayssm_cache_base = self.replayssm_is_flush = None
        cache = self.mamba_cache
        state, steps = cache.temporal, cache.intermediate_conv_window[0].shape[2]
        rings = {f.name: None for f in fields(cache) if f.name.startswith("replayssm_")}
        # The backend insists on a tensor of this shape. This one has no memory of its own; see
        # `verify_without_snapshots`.
        rows = kwargs["spec_state_size"] + 1
        empty = state.new_zeros(()).expand(state.shape[0], rows, steps, *state.shape[2:])
        self.mamba_cache = replace(cache, intermediate_ssm=empty, **rings)
        self.recording = Recording()


def record_verify(
    original: Any,
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Any,
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Any:
    """Around `GDNAttnBackend.forward_extend`: record the inputs of a verify forward."""
    pool = backend.req_to_token_pool
    if forward_batch.forward_mode.is_target_verify() and isinstance(pool.mamba_pool, ReplayPool):
        slots = backend.forward_metadata.mamba_cache_indices
        block = forward_batch.spec_info.draft_token_num
        pool.mamba_pool.recording.record(pool, layer, a, b, slots, block)
    return original(backend, layer, forward_batch, mixed_qkv, a, b, **kwargs)


def verify_without_snapshots(original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `GDNKernelDispatcher.target_verify`: no snapshots if their buffer has no memory.

    SGLang's Triton kernel picks a launch shape by whether there is a buffer (on sm_90 an eighth of
    the programs without one), and skips requests whose row in it is negative.
    """
    buffer = kwargs.get("intermediate_states_buffer")
    if buffer is None or any(buffer.stride()):
        return original(dispatcher, *args, **kwargs)
    kernel = dispatcher._get_target_verify_kernel(kwargs.get("retrieve_parent_token"))
    if buffer.device.type == "cuda" and isinstance(kernel, TritonGDNKernel):
        if not hasattr(dispatcher, "no_rows"):
            # For all layers and graphs: as long as SGLang's table of rows, which never changes.
            dispatcher.no_rows = torch.full_like(kwargs["intermediate_state_indices"], -1)
        kwargs["intermediate_state_indices"] = dispatcher.no_rows
    else:
        kwargs["intermediate_states_buffer"] = None
    return original(dispatcher, *args, **kwargs)
