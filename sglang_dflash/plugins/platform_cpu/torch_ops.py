"""Torch replacements of SGLang functions that call CUDA or Triton without asking the platform."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.log import Log
from sglang_dflash.drafting import noise
from sglang_dflash.patches.restored import restored
from sglang_dflash.plugins.platform_cpu import ATTENTION_BACKEND

logger = Log(__name__)

# Layouts of the hierarchical cache's host memory that `host_pool` knows.
HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
# SGLang's LoRA backend that needs torch only.
LORA_BACKEND = "torch_native"


def torch_backends(server_args: Any) -> None:
    """Declare torch backends for attention, sampling, experts and LoRA.

    Raises:
        ConfigError: the user asks for a backend that needs more than torch, or for a split of the
            context or a layout of host memory that ours does not know.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    settings = resolving_view(server_args)
    flags = (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    )
    if settings.speculative_draft_attention_backend == "torch":
        # Our name of the torch backend, on every device. SGLang names it otherwise.
        declare_resolution(
            server_args, "plain_cpu_platform", speculative_draft_attention_backend=ATTENTION_BACKEND
        )
        settings = resolving_view(server_args)
    for name in flags:
        flag, value = f"--{name.replace('_', '-')}", getattr(settings, name)
        if value not in (None, ATTENTION_BACKEND):
            raise ConfigError(flag, value, "cannot run on a plain CPU; leave it out")
    if settings.dcp_size > 1:
        # Its attention would read slots of other ranks.
        raise ConfigError(
            "--dcp-size", settings.dcp_size, "cannot run on a plain CPU; leave it out"
        )
    layout = settings.hicache_mem_layout
    if settings.enable_hierarchical_cache and layout not in HOST_LAYOUTS:
        required = f"cannot run on a plain CPU; choose one of {', '.join(HOST_LAYOUTS)}"
        raise ConfigError("--hicache-mem-layout", layout, required)
    if settings.moe_runner_backend not in ("auto", "triton"):
        required = "cannot run on a plain CPU; 'auto' can"
        raise ConfigError("--moe-runner-backend", settings.moe_runner_backend, required)
    # SGLang's default, which needs Triton, is not the user's choice.
    if settings.lora_backend not in ("csgmv", LORA_BACKEND):
        required = f"cannot run on a plain CPU; {LORA_BACKEND!r} can"
        raise ConfigError("--lora-backend", settings.lora_backend, required)
    backends = {
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        # torch computes experts in any case. With another value, SGLang would store the experts of
        # gpt-oss transposed.
        "moe_runner_backend": "triton",
        "lora_backend": LORA_BACKEND,
    }
    declare_resolution(server_args, "plain_cpu_platform", **backends)


def check_as_amx(original: Any, server_args: Any) -> Any:
    """Around the adjustments to a model's class, which check its attention backends: show ours as
    "intel_amx", the CPU backend that SGLang knows to serve sinks and windows."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of
    with restored(model_hook, "attention_backends_of"):
        model_hook.attention_backends_of = lambda settings: tuple(
            "intel_amx" if name == ATTENTION_BACKEND else name for name in backends_of(settings)
        )
        return original(server_args)


def skip_binding(*, device: str) -> None:
    """Leave the placement of threads to the operating system."""
    del device


def share_cores(**_: Any) -> None:
    """Divide the number of threads by the number of ranks, without binding them to cores."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    ranks = parallel.dp_size * parallel.tp_size * parallel.pp_size
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


def gather_on_cpu(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """Call the body of SGLang's custom operator directly."""
    group._all_gather_into_tensor(output, input)


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new KV slots to positions `start_offset ... end_offset - 1` of every request.

    out_cache_loc holds the slots request after request; req_to_token is `[requests, positions]`.
    """
    used = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[request, start:end] = out_cache_loc[used : used + end - start].to(
            req_to_token.dtype
        )
        used += end - start


def skip_batch_invariant_kernels(_model_runner: Any) -> None:
    """Deterministic inference without batch-invariant matrix products: requests are seeded."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().deterministic.enable_deterministic_inference:
        logger.warning(
            "--enable-deterministic-inference on a plain CPU: requests are seeded, "
            "matrix products are not batch-invariant"
        )


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """SGLang's hash of seeded sampling: uint32 `[N, V]` from `[N]`, `[N]` and `[V]`."""
    return noise.murmur_hash32(seed[:, None], positions[:, None], col_indices).to(torch.uint32)


def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """RMSNorm and RoPE of the built-in DFLASH worker's draft, in place.

    qkv is `[T, heads * D]`, q before k, positions `[T]`, cos_sin_cache `[positions, D]`.
    """
    heads = qkv[:, : (num_q_heads + num_k_heads) * head_dim].unflatten(1, (-1, head_dim))
    weight = torch.cat((q_weight.repeat(num_q_heads, 1), k_weight.repeat(num_k_heads, 1)))
    x = heads.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    # SGLang's kernel rounds between the norm and the rotation.
    low, high = x.to(qkv.dtype).float().chunk(2, dim=-1)
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


def softcap_inplace_logits(
    full_logits: torch.Tensor, final_logit_softcapping: float
) -> torch.Tensor:
    """Bound logits of any shape to less than the cap, in place, and return them."""
    return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)


def forbid_tokens(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """In place of `XGrammarGrammarBackend.apply_vocab_mask`: mask logits in place on the CPU."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def draft_in_own_dtype(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast the draft's input embeddings to the dtype of its weights."""
    if kwargs.get("input_embeds") is not None:
        kwargs["input_embeds"] = kwargs["input_embeds"].to(self.fc.weight.dtype)
    return original(self, *args, **kwargs)


# The attribute holds a name, not a torch.dtype: SGLang prints configurations as JSON.
_MODEL_DTYPE = "plain_cpu_model_dtype"


def note_model_dtype(_result: None, model_config: Any, *_args: Any, **_kwargs: Any) -> None:
    """Store the model's dtype, --dtype included, where `conv_cache_in_model_dtype` reads it."""
    name = str(model_config.dtype).removeprefix("torch.")
    setattr(model_config.hf_text_config, _MODEL_DTYPE, name)


def conv_cache_in_model_dtype(original: Any, config: Any = None) -> Any:
    """Keep convolution inputs in the model's dtype unless SGLANG_MAMBA_CONV_DTYPE is set."""
    from sglang.srt.environ import envs

    dtype_name = getattr(config, _MODEL_DTYPE, None)
    if dtype_name is None or envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        return original(config)
    return dataclasses.replace(original(config), conv=getattr(torch, dtype_name))


_RECORD_STREAM = torch.Tensor.record_stream


def record_stream(self: torch.Tensor, stream: Any) -> None:
    """In place of `torch.Tensor.record_stream`: ignore CPU tensors, which belong to no stream."""
    if self.device.type != "cpu":
        _RECORD_STREAM(self, stream)


def pin_memory(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """In place of `torch.Tensor.pin_memory`: return the tensor itself."""
    return self


class _Unpinned(TorchFunctionMode):
    """Drops `pin_memory` from every call of a torch function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **options)


def create_stream(original: Any, device: torch.device | str) -> Any:
    """Return a stream of the device. For a CPU, torch's stand-in does nothing."""
    return torch.cpu.Stream() if torch.device(device).type == "cpu" else original(device)


def call_without_pinning(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the original function with `pin_memory` dropped from every torch call."""
    with _Unpinned():
        return original(*args, **kwargs)


def create_on_host(original: Any, *args: Any, **kwargs: Any) -> None:
    """Around a constructor that makes parameters on the current GPU: make them on the CPU."""
    with restored(torch.cuda, "current_device"):
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        original(*args, **kwargs)


def send_pages_without_event(
    has_sender: bool, _queue: Any, req: Any, *_args: Any, **_kwargs: Any
) -> bool:
    """After a request got its sender: send page numbers without a pinned copy and an event, since
    they are in host memory already."""
    if has_sender:
        req.disagg_kv_sender.supports_host_tensor_indices = False
    return has_sender


def send_prefix_without_event(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Around the sending of a cached prefix: do not wait for an event. On a CPU, a forward that has
    returned has written its K/V."""
    with restored(scheduler, "enable_overlap"):
        scheduler.enable_overlap = False
        original(scheduler, *args, **kwargs)
