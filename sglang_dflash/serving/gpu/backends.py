"""Which operations and which attention the drafter computes with, by device and by flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_dflash.drafting.attention.backend import (
    BACKENDS,
    Backend,
    Capabilities,
    DraftAttention,
    Setting,
    choose_attention,
)
from sglang_dflash.drafting.ops import DraftOps, TorchOps
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError

# SGLang's name for its torch backend on a plain CPU.
SAME = {"torch_native": "torch"}
# The first GPUs that Triton converts e4m3 for.
FP8_CAPABILITY = (8, 9)


def _triton(config: DraftConfig, setting: Setting) -> DraftAttention:
    from dflash_kernels.draft_attention import make

    return make(config, setting)


def _triton_workspace(config: DraftConfig, setting: Setting) -> int:
    from dflash_kernels.draft_attention import workspace_bytes

    return workspace_bytes(config, setting)


def _fa3(config: DraftConfig, setting: Setting) -> DraftAttention:
    from sglang_dflash.serving.gpu.flash_attention import fa3

    return fa3(config, setting)


def _fa4(config: DraftConfig, setting: Setting) -> DraftAttention:
    from sglang_dflash.serving.gpu.flash_attention import fa4

    return fa4(config, setting)


def _flashinfer(config: DraftConfig, setting: Setting) -> DraftAttention:
    from sglang_dflash.serving.gpu.flashinfer_attention import flashinfer

    return flashinfer(config, setting)


def _flashinfer_workspace(config: DraftConfig, setting: Setting) -> int:
    from sglang_dflash.serving.gpu.flashinfer_attention import WORKSPACE_BYTES, WRAPPER_BYTES

    return WORKSPACE_BYTES + WRAPPER_BYTES * len(set(config.layers))


_CUDA = frozenset({"cuda"})
# Of kernels whose queries and keys are of one dtype, a tensor core's.
_HALF = frozenset({torch.bfloat16, torch.float16})
# The preferred ones first. Their modules are loaded when they are made: each needs another package.
ATTENTION: Mapping[str, Backend] = {
    "triton": Backend(
        Capabilities(devices=_CUDA, head_dims=frozenset({16, 32, 64, 128, 256}), capturable=True),
        _triton,
        _triton_workspace,
    ),
    **BACKENDS,
    "fa3": Backend(
        Capabilities(
            _CUDA,
            head_dims=frozenset({64, 128, 256}),
            capturable=True,
            scratch=True,
            kv_dtypes=_HALF,
        ),
        _fa3,
    ),
    "fa4": Backend(
        Capabilities(
            _CUDA,
            head_dims=frozenset({64, 128}),
            capturable=True,
            scratch=True,
            kv_dtypes=_HALF,
        ),
        _fa4,
    ),
    "flashinfer": Backend(
        Capabilities(_CUDA, head_dims=frozenset({64, 128, 256}), scratch=True, kv_dtypes=_HALF),
        _flashinfer,
        _flashinfer_workspace,
    ),
}


def draft_ops(device: torch.device) -> DraftOps:
    """Triton's on CUDA, torch's elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    from dflash_kernels.draft_ops import TritonOps

    return TritonOps()


def asked_attention(server_args: Any) -> str | None:
    """The value of --speculative-draft-attention-backend as given; None for the automatic choice.

    SGLang resolves an unset flag to the target's backend, and replaces names that it does not know.
    Its resolution is kept beside the field, which holds what was given.
    """
    given = server_args.speculative_draft_attention_backend
    return SAME.get(given, given)


def check_attention(
    server_args: Any,
    config: DraftConfig,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Raise ConfigError if the flag asks for a backend that cannot serve the draft there.

    Args:
        kv_dtype: of the draft KV cache; None if it is not known.
    """
    choose_attention(asked_attention(server_args), config, device, ATTENTION, kv_dtype)


def kv_dtype(
    target: str, draft: str | None, attention: str | None, model_dtype: torch.dtype
) -> torch.dtype:
    """The dtype of draft K/V by SGLang's flags: --speculative-draft-kv-cache-dtype (`draft`), else
    --kv-cache-dtype (`target`).

    Args:
        attention: the draft attention backend; SGLang gives a draft on fa4 the models' dtype.
        model_dtype: of the models.
    """
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=target,
        speculative_draft_kv_cache_dtype=draft,
        model=None,
        model_dtype=model_dtype,
        is_draft_worker=True,
        is_dflash=True,
        speculative_draft_attention_backend=attention or "",
    )
    return dtype


def check_kv_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the kernels cannot read and write draft K/V of that dtype there."""
    if device.type != "cuda" or dtype != torch.float8_e4m3fn:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            "--speculative-draft-kv-cache-dtype",
            "fp8_e4m3",
            f"this needs a GPU of capability {'.'.join(map(str, FP8_CAPABILITY))} or later, this "
            f"one's is {'.'.join(map(str, capability))}; give bf16, which leaves the target's K/V "
            "as it is",
        )


def unserved_attention(server_args: Any) -> str | None:
    """The flag with its value, if that is a backend of SGLang's that ours has no counterpart of;
    else None."""
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    asked = asked_attention(server_args)
    if asked in ATTENTION or asked not in DRAFT_ATTENTION_BACKEND_CHOICES:
        return None
    return f"--speculative-draft-attention-backend {asked}"
