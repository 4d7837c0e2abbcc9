"""What SGLang does with a CUDA or Triton call and no platform seam: replaced by torch, on this platform only."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.overrides import TorchFunctionMode

from sglang_dflash.platform_cpu.gdn_ops import register_gdn_hooks
from sglang_dflash.platform_cpu.platform import ATTENTION_BACKEND

logger = logging.getLogger(__name__)

# SGLang's default for --lora-backend, which is Triton's, and the one of its LoRA backends that is torch alone.
LORA_DEFAULT, LORA_BACKEND = "csgmv", "torch_native"


def register_hooks() -> None:
    """Register all replacements; SGLang applies them once every plugin has run."""
    # Read by the scheduler process, which the launcher starts later. The HTTP server, tokenizer and detokenizer are processes of
    # their own: a core that the scheduler's OpenMP threads spin on is taken from them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.arg_groups.platform_hook.handle_cpu_backends", torch_backends, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.models.dflash.DFlashDraftModel.forward", draft_in_own_dtype, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32, HookType.REPLACE
    )
    runner = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
    HookRegistry.register(runner, no_batch_invariant_kernels, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.configs.model_config.ModelConfig.__init__", note_model_dtype, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.configs.mamba_utils.mamba2_state_dtype",
        conv_cache_in_model_dtype,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.distributed.bootstrap._bind_threads_if_cpu", no_binding, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env", share_cores, HookType.REPLACE
    )
    group = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor"
    HookRegistry.register(group, gather_on_cpu, HookType.REPLACE)
    for method in ("__init__", "prepare_lora_batch"):
        HookRegistry.register(
            f"sglang.srt.lora.lora_manager.LoRAManager.{method}",
            without_pinned_memory,
            HookType.AROUND,
        )
    register_gdn_hooks()
    choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    choices.DRAFT_ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]


def torch_backends(server_args: Any) -> None:
    """SGLang's rule for --device cpu picks the kernels of its AMX engine wherever the CPU has AMX; here it is torch."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    settings = resolving_view(server_args)
    flags = (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    )
    asked = {f"--{name.replace('_', '-')}": getattr(settings, name) for name in flags}
    wrong = [
        f"{flag}: {value!r}"
        for flag, value in asked.items()
        if value not in (None, ATTENTION_BACKEND)
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot run on a plain CPU; {ATTENTION_BACKEND!r} can")
    if settings.lora_backend not in (LORA_DEFAULT, LORA_BACKEND):
        raise ValueError(
            f"--lora-backend: {settings.lora_backend!r} cannot run on a plain CPU; {LORA_BACKEND!r} can"
        )
    ours = {
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        "lora_backend": LORA_BACKEND,
    }
    declare_resolution(server_args, "plain_cpu_platform", **ours)


def no_binding(*, device: str) -> None:
    """SGLang binds every rank to a NUMA node of its own and refuses to start where there are fewer nodes than ranks."""
    del device


def share_cores(**_: Any) -> None:
    """All ranks share all cores; SGLang's way of telling them apart is a kernel of its AMX engine."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    ranks = parallel.dp_size * parallel.tp_size * parallel.pp_size
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


def gather_on_cpu(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """SGLang's custom operator for it is registered for accelerators only."""
    group._all_gather_into_tensor(output, input)


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Enter freshly allocated KV slots, request after request, at positions `start_offset ... end_offset - 1`."""
    taken = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(
            req_to_token.dtype
        )
        taken += end - start


def no_batch_invariant_kernels(_model_runner: Any) -> None:
    """Deterministic inference seeds every request; the batch-invariant matrix products that go with it are Triton's."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().deterministic.enable_deterministic_inference:
        logger.warning(
            "--enable-deterministic-inference on a plain CPU: requests are seeded, matrix products are not batch-invariant"
        )


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (Appleby, x86 32-bit) of 64-bit seed, position and column: uint32 `[N, V]` from `[N]`, `[N]` and `[V]`.

    SGLang seeds a request's sampling by it; its own CPU version is one of the AMX engine's kernels.
    """
    low32 = 0xFFFFFFFF

    def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
        return ((x << bits) | (x >> (32 - bits))) & low32

    seed = seed.to(torch.int64)
    h = torch.zeros(len(seed), len(col_indices), dtype=torch.int64)
    for word in (
        seed[:, None],
        (seed >> 32)[:, None],
        positions.long()[:, None],
        col_indices.long(),
    ):
        k = rotated(((word & low32) * 0xCC9E2D51) & low32, 15) * 0x1B873593 & low32
        h = (rotated(h ^ k, 13) * 5 + 0xE6546B64) & low32
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low32
    return (h ^ (h >> 16)).to(torch.uint32)


def draft_in_own_dtype(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's model runner hands a draft bfloat16 embeddings whatever its dtype; a float32 draft needs float32."""
    if kwargs.get("input_embeds") is not None:
        kwargs["input_embeds"] = kwargs["input_embeds"].to(self.fc.weight.dtype)
    return original(self, *args, **kwargs)


# Not a tensor type: SGLang prints configurations as JSON.
_MODEL_DTYPE = "plain_cpu_model_dtype"


def note_model_dtype(_result: None, model_config: Any, *_args: Any, **_kwargs: Any) -> None:
    """Leave the model's dtype, --dtype included, where the size of its recurrent state is asked for."""
    setattr(
        model_config.hf_text_config, _MODEL_DTYPE, str(model_config.dtype).removeprefix("torch.")
    )


def conv_cache_in_model_dtype(original: Any, config: Any = None) -> Any:
    """SGLang keeps convolution inputs as bfloat16 unless SGLANG_MAMBA_CONV_DTYPE says otherwise, and copies activations of
    the model's dtype into them unconverted: float32, this platform's usual dtype, fails."""
    from sglang.srt.environ import envs

    known = getattr(config, _MODEL_DTYPE, None)
    if known is None or envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        return original(config)
    return dataclasses.replace(original(config), conv=getattr(torch, known))


_record_stream = torch.Tensor.record_stream


def record_stream(self: torch.Tensor, stream: Any) -> None:
    """A CPU tensor belongs to no stream: nothing to record."""
    if self.device.type != "cpu":
        _record_stream(self, stream)


def pin_memory(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """There is no device to copy to: SGLang pins the track mask of hybrid models without asking whether that is possible."""
    return self


class _Unpinned(TorchFunctionMode):
    """Tensors are made in ordinary memory, whatever their maker asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        )


def without_pinned_memory(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's LoRA layers and batches are made in pinned memory without asking whether there is any."""
    with _Unpinned():
        return original(*args, **kwargs)
