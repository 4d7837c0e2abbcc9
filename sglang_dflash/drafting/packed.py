"""Weights of linear layers, packed once for products of a few rows on a CPU.

A product of one row reads as many bytes as one of eight, so a step that verifies a block costs
little more than plain decoding, if the product does not copy the weight to another layout first.
Every packed product gives a row the same bits, whatever rows are beside it, where
`tests/drafting/test_packed.py` finds it so.
"""

from __future__ import annotations

import platform
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows that oneDNN lays a float32 weight out for. With fewer a single row has a layout of its own.
ROWS = 8
# A float32 product has so many rows at least: two take a third longer (SmolLM2's products 40 ms
# instead of 30, with AVX-512), and a single one is summed in another order.
LEAST_ROWS = 4


class Packed(Protocol):
    """A packed weight `[N, K]`, for x of this dtype."""

    dtype: torch.dtype
    nbytes: int

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x `[..., K]` times the weight's transpose, plus bias `[N]`: `[..., N]`."""

    def unpacked(self) -> Tensor:
        """The weight `[N, K]`, in the dtype of x."""


class OneDnn:
    """A weight in its own dtype, float32 or bfloat16, laid out by oneDNN."""

    def __init__(self, weight: Tensor) -> None:
        # In bfloat16 the layout for one row is the one that is the same for all numbers of rows.
        rows = ROWS if weight.dtype == torch.float32 else 1
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        self.dtype, self.nbytes = weight.dtype, weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[:-1].numel()
        if self.dtype == torch.float32 and 0 < rows < LEAST_ROWS:
            padded = F.pad(x.reshape(rows, -1), (0, 0, 0, LEAST_ROWS - rows))
            return self(padded, bias)[:rows].view(*x.shape[:-1], -1)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")

    def unpacked(self) -> Tensor:
        return self._weight.to_dense()


class Float16:
    """A weight in float16 by FBGEMM, for float32 rows; sums are float32.

    A bfloat16 weight is exact in float16 from 6e-5 on; a smaller one is off by 3e-8 at most.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.nbytes = 2 * weight.numel()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.ops.quantized.linear_dynamic_fp16(x, self._weight)
        return out if bias is None else out.add_(bias)

    def unpacked(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self._weight)[0]


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 products, and torch uses them."""
    mkldnn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(mkldnn and (torch.cpu._is_avx512_bf16_supported() or has_amx()))


def has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def packs_float16() -> bool:
    """Return whether this build of torch has FBGEMM."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack(weight: Tensor, float16: bool = False) -> Packed | None:
    """A weight `[N, K]` on a CPU, packed; None if this machine's torch has nothing for it.

    Args:
        float16: keep 16 bits of each number of a weight whose rows are float32.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if weight.device.type != "cpu" or weight.dim() != 2 or not x86:
        return None
    wide = weight.dtype == torch.float32
    if (
        float16
        and wide
        and packs_float16()
        and weight.abs().amax() <= torch.finfo(torch.float16).max
    ):
        return Float16(weight)
    if not torch.backends.mkldnn.is_available():
        return None
    if wide or (weight.dtype == torch.bfloat16 and multiplies_bfloat16()):
        return OneDnn(weight)
    return None


def pack_again(weight: Tensor, float16: bool) -> Packed:
    """A weight in place of one that `pack` has packed."""
    packed = pack(weight, float16)
    if packed is None:
        raise ValueError(f"a {weight.dtype} weight was packed before, and cannot be now")
    return packed


class PackedLinear(nn.Module):
    """Replacement of an `nn.Linear` whose training is over, with a packed weight.

    Args:
        float16: as it was packed (`pack`).
    """

    def __init__(
        self, weight: Packed, bias: Tensor | None, out_features: int, float16: bool = False
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.packed_weight, self.bias, self._float16 = weight, bias, float16

    def forward(self, x: Tensor) -> Tensor:
        return self.packed_weight(x, self.bias)

    def replace(self, weight: Tensor) -> None:
        """Pack another weight, of the same shape and dtype."""
        self.packed_weight = pack_again(weight, self._float16)


def pack_linears(module: nn.Module, float16: bool = False) -> None:
    """Put a `PackedLinear` in the place of every `nn.Linear` inside for which there is one."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            packed = pack(child.weight.data, float16)
            if packed is not None:
                packed_linear = PackedLinear(packed, child.bias, child.out_features, float16)
                setattr(module, name, packed_linear)
        else:
            pack_linears(child, float16)


def packed_of(layer: nn.Module | None) -> Packed | None:
    """The packed weight of a layer, one of SGLang's or ours; None if it is not packed."""
    return getattr(layer, "__dict__", {}).get("packed_weight")


def without_bias(layer: nn.Linear | PackedLinear, x: Tensor) -> Tensor:
    """x `[..., K]` times a linear layer's weight, `[..., N]`."""
    if isinstance(layer, PackedLinear):
        return layer.packed_weight(x)
    return F.linear(x, layer.weight)


def plain_weight(layer: nn.Linear | PackedLinear) -> Tensor:
    """A linear layer's weight `[N, K]`; of a packed one a copy."""
    return layer.packed_weight.unpacked() if isinstance(layer, PackedLinear) else layer.weight
