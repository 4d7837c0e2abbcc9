"""The weights of a quantized draft, computed once, when it is loaded. The formats are in
`checkpoint/quantization.py`. Our network multiplies in 16 or 32 bits.

Codes and scales are multiplied in float32 and rounded once, to the served dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sglang_dflash.checkpoint.quantization import Declared, Quantization, Stored, part
from sglang_dflash.common.errors import ConfigError

# dtypes of a draft's tensors, as safetensors names them.
STORED_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
# The numbers that 4 bits stand for in FP4 (E2M1).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# AWQ packs the columns 0 to 7 of its kernel's order into one int32, from the lowest bits.
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)


def dequantized(
    quantization: Quantization, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of a draft, with a weight of that dtype in place of a module's codes and scales.

    Raises:
        ConfigError: tensors of a module do not fit each other, or a value is not finite.
    """
    plain = dict(tensors)
    dtypes = {name: STORED_DTYPES.get(tensor.dtype, "") for name, tensor in tensors.items()}
    for module, way in quantization.modules(dtypes):
        format_ = way.format
        parts = {
            name: plain.pop(part(module, name))
            for name in (format_.codes, *format_.scales, *format_.optional)
            if part(module, name) in plain
        }
        plain[part(module, "weight")] = _weight(module, way, parts).to(dtype)
    return plain


def _weight(module: str, way: Stored, parts: Mapping[str, Tensor]) -> Tensor:
    """A module's weight, in float32."""
    codes = parts[way.format.codes]
    shape = way.format.shape(tuple(codes.shape), way.declared.bits)
    field = f"tensor {part(module, way.format.codes)} of the draft"
    try:
        weight = WEIGHTS[way.format.name](parts, way.declared).reshape(shape)
    except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
        scales = {name: list(parts[name].shape) for name in way.format.scales}
        required = f"its scales do not fit: {scales} with codes of {list(codes.shape)}"
        raise ConfigError(field, required=f"{required}, {way.declared}") from error
    if not bool(weight.isfinite().all()):
        raise ConfigError(field, required="with its scales, NaN or infinite; finite is required")
    if not bool(weight.any()):
        raise ConfigError(field, required="with its scales, all zeros; trained weights required")
    return weight


# -- one function for each format ------------------------------------------------------------------


def _packed(parts: Mapping[str, Tensor], declared: Declared) -> Tensor:
    """Unpack and dequantize integers that compressed-tensors has packed."""
    # It takes two seconds to load, and few drafts need it.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    groups = parts["weight_scale"].shape[-1]
    weights = QuantizationArgs(
        num_bits=declared.bits,
        symmetric="weight_zero_point" not in parts,
        strategy="channel" if groups == 1 else "group",
        group_size=None if groups == 1 else int(parts["weight_shape"][-1]) // groups,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    # The dtype of the scales is that of its products.
    compressed = {**parts, "weight_scale": parts["weight_scale"].float()}
    unpack = BaseCompressor.get_value_from_registry("pack-quantized")
    return unpack.decompress(compressed, scheme)["weight"]


def _scaled(name: str) -> Callable[[Mapping[str, Tensor], Declared], Tensor]:
    def weight(parts: Mapping[str, Tensor], declared: Declared) -> Tensor:
        codes = parts["weight"].float()
        return codes * _spread(parts[name].float(), codes.shape, declared.block)

    return weight


def _nvfp4(codes: str, scale: Callable[[Mapping[str, Tensor]], Tensor]) -> Callable[..., Tensor]:
    """compressed-tensors would round the product to bfloat16."""

    def weight(parts: Mapping[str, Tensor], _: Declared) -> Tensor:
        packed = parts[codes].int()
        numbers = torch.tensor(_FP4)[torch.stack((packed & 15, packed >> 4), -1).flatten(1)]
        return numbers * _spread(scale(parts), numbers.shape)

    return weight


def _awq(parts: Mapping[str, Tensor], declared: Declared) -> Tensor:
    codes, zeros = (
        _unpacked(parts[name], declared.bits).unflatten(1, (-1, 8))[:, :, _AWQ_COLUMNS].flatten(1)
        for name in ("qweight", "qzeros")
    )
    scales = parts["scales"].float()
    shape = codes.shape
    return ((codes - _spread(zeros, shape)) * _spread(scales, shape)).T.contiguous()


def _gptq(parts: Mapping[str, Tensor], declared: Declared) -> Tensor:
    codes = _unpacked(parts["qweight"].T, declared.bits).T
    # In its first layout a zero point is stored as one less.
    zeros = _unpacked(parts["qzeros"], declared.bits) + (declared.layout == "gptq")
    scales = parts["scales"].float()
    groups = parts.get("g_idx")
    if groups is None:
        zeros, scales = _spread(zeros, codes.shape), _spread(scales, codes.shape)
    else:
        zeros, scales = zeros[groups.long()], scales[groups.long()]
    return ((codes - zeros) * scales).T.contiguous()


WEIGHTS: Mapping[str, Callable[[Mapping[str, Tensor], Declared], Tensor]] = {
    "packed": _packed,
    "scaled": _scaled("weight_scale"),
    "inverse scaled": _scaled("weight_scale_inv"),
    "nvfp4 packed": _nvfp4(
        "weight_packed", lambda p: p["weight_scale"].float() / p["weight_global_scale"].float()
    ),
    "nvfp4": _nvfp4("weight", lambda p: p["weight_scale"].float() * p["weight_scale_2"].float()),
    "awq": _awq,
    "gptq": _gptq,
}


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The unsigned numbers of int32 words `[R, C]`, from the lowest bits: `[R, C * 32 / bits]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)


def _spread(scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None = None) -> Tensor:
    """A scale for every element of a matrix: of one for all, one per row, or one per block, whose
    size follows from the shapes unless it is given."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(*shape)
    if scale.ndim == 1:
        scale = scale[:, None]
    for axis in (0, 1):
        size = block[axis] if block else shape[axis] // scale.shape[axis]
        scale = scale.repeat_interleave(size, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    if scale.shape != torch.Size(shape):
        raise ValueError("a scale for each element is required")
    return scale
