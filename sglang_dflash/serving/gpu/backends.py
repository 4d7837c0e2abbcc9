"""Choice of the drafter's operations and attention backend, by device and by flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.backend import Backend
from sglang_dflash.drafting.attention.capabilities import CAPABILITIES
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.patches.patch import LazyImport

# The first GPUs that Triton converts e4m3 for.
FP8_CAPABILITY = (8, 9)


_FLASH = "sglang_dflash.serving.gpu.flash_attention:"
# Their modules are loaded when they are made: each needs another package.
ATTENTION: Mapping[str, Backend] = {
    "triton": Backend(
        CAPABILITIES["triton"], LazyImport("dflash_kernels.draft_attention:TritonAttention")
    ),
    "torch": Backend(
        CAPABILITIES["torch"], lambda sizes: TorchAttention(sizes.layers, sizes.load.draft_block)
    ),
    "fa3": Backend(CAPABILITIES["fa3"], LazyImport(_FLASH + "fa3")),
    "fa4": Backend(CAPABILITIES["fa4"], LazyImport(_FLASH + "fa4")),
}


def draft_ops(device: torch.device) -> TorchOps:
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
    backend = server_args.speculative_draft_attention_backend
    # SGLang's name for its torch backend on a plain CPU.
    return "torch" if backend == "torch_native" else backend


def draft_kv_dtype(server_args: Any, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of draft K/V by SGLang's flags: --speculative-draft-kv-cache-dtype, else
    --kv-cache-dtype. A draft that is asked to attend with fa4 has the models' dtype.

    The draft attention backend that SGLang resolves does not count: it is that of its own worker,
    which takes the target's.

    Args:
        server_args: SGLang's, in the launching process or a scheduler's.
        model_dtype: of the models.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    settings = resolving_view(server_args)
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=settings.kv_cache_dtype,
        speculative_draft_kv_cache_dtype=settings.speculative_draft_kv_cache_dtype,
        model=None,
        model_dtype=model_dtype,
        is_draft_worker=True,
        is_dflash=True,
        speculative_draft_attention_backend=asked_attention(server_args) or "",
    )
    return dtype


def check_model_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if SGLang's RMSNorm cannot compute in that dtype there: it would end the
    server while graphs are captured, with advice about memory."""
    if device.type != "cuda" or dtype.itemsize == 2:
        return
    from sgl_kernel import rmsnorm

    x = torch.ones(1, 64, dtype=dtype, device=device)
    try:
        rmsnorm(x, x[0])
    except RuntimeError as error:
        required = "SGLang's kernels on a GPU take 16 bits only; give bfloat16"
        raise ConfigError("--dtype", str(dtype).removeprefix("torch."), required) from error


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
