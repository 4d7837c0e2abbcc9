"""Marlin, the kernel that multiplies 16-bit activations by weights of NVFP4, in torch code.

The order of the packed weights is Marlin's own business: here they stay as they are loaded, in the
shape that SGLang gives them. SGLang computes the scales, in the order and encoding that Marlin
reads, and this code decodes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# So many numbers of a column have a scale.
GROUP = 16
# The values of NVFP4's codes (E2M1), the sign in the highest bit.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat((E2M1, -E2M1))


def repack(weight: Tensor, perm: Tensor, out: Tensor, k: int, n: int, bits: int) -> None:
    """From `[K / 8, N]`, eight codes of a column per int32."""
    if perm.numel():
        raise NotImplementedError("activations in another order (desc_act)")
    out.view(-1).copy_(weight.flatten())


def codes_of(weight: Tensor, k: int, n: int) -> Tensor:
    """Return int64 `[K, N]`."""
    words = weight.view(k // 8, 1, n)
    return (words >> torch.arange(0, 32, 4)[:, None] & 15).view(k, n).long()


def in_order(scales: Tensor) -> Tensor:
    """Undo `marlin_permute_scales`."""
    from sglang.srt.layers.quantization.marlin_utils import get_scale_perms

    order = torch.tensor(get_scale_perms()[0]).argsort()
    return scales.reshape(-1, len(order))[:, order].view(scales.shape)


def nvfp4_scales(scales: Tensor) -> Tensor:
    """Undo `nvfp4_marlin_process_scales`: five bits of exponent, three of mantissa, times 2^7."""
    halves = (scales.view(torch.uint8).to(torch.int16) << 8 - 1).view(torch.float16)
    return halves.float().view(-1, 4)[:, [0, 2, 1, 3]].view(scales.shape) / 2**7


def nvfp4_global_scale(scale: Tensor) -> Tensor:
    """Undo `nvfp4_marlin_process_global_scale`."""
    exponent_bits = {torch.float16: 5, torch.bfloat16: 8}[scale.dtype]
    return scale.float() / 2.0 ** (2 ** (exponent_bits - 1) - 2 - 7)


def gemm(
    a: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    zeros: Tensor,
    g_idx: Tensor,
    perm: Tensor,
    out: Tensor,
    partial_sums: Tensor,
    reordered: Tensor,
    workspace: Tensor,
    weight_type: int,
    *_: bool,
) -> None:
    """`out [M, N] = a [M, K] @ weight`, added up in float32."""
    from sgl_kernel.scalar_type import scalar_types

    if weight_type != scalar_types.float4_e2m1f.id:
        raise NotImplementedError(f"Marlin with weights of type {weight_type}")
    k, n = a.shape[1], out.shape[1]
    values = E2M1[codes_of(weight, k, n)]
    scale = in_order(nvfp4_scales(scales)) * nvfp4_global_scale(global_scale)
    out.copy_(a.float() @ (values * scale.repeat_interleave(GROUP, 0)))


MODULES: dict[str, Callable[..., dict[str, Callable[..., None]]]] = {
    "gptq_marlin_repack": lambda *_: {"gptq_marlin_repack": repack},
    "gptq_marlin": lambda *_: {"gptq_marlin_gemm": gemm},
}
