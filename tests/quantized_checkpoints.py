"""Quantized models, as exporters write them, beside the same values as plain weights.

Of compressed-tensors the library itself writes and reads. The other layouts are written here number
by number, by what their exporters and the kernels of SGLang say of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Parts = dict[str, Tensor]
# Projections that servers multiply by at once: a scale of a whole tensor is the same for all.
STACKED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)


@dataclass(frozen=True)
class Exporter:
    """One kind of quantized checkpoint.

    Attributes:
        config: its `quantization_config`.
        quantize: the tensors of a module's weight `[out, in]`, and the values they stand for; it is
            also given the largest magnitude in what servers stack with that weight.
        file: the JSON file that has the config, under another key, in place of config.json.
        keep: parts of the names of tensors that stay as they are, as all do that are no matrices.
    """

    config: Mapping[str, Any]
    quantize: Callable[[Tensor, Tensor], tuple[Parts, Tensor]]
    file: str | None = None
    keep: tuple[str, ...] = ("norm", "conv")

    def write(self, source: Path, folder: Path, plain: Path) -> None:
        """Write a model to `folder`, quantized, and to `plain`, with the same values."""
        tensors = load_file(source / "model.safetensors")
        stored, dense = {}, {}
        for name, tensor in tensors.items():
            dense[name] = stored[name] = tensor
            if tensor.ndim != 2 or any(part in name for part in self.keep):
                continue
            del stored[name]
            largest = max(part.abs().max() for part in _stacked(name, tensors)).float()
            parts, dense[name] = self.quantize(tensor.float(), largest)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": own.contiguous() for part, own in parts.items()}
            dense[name] = dense[name].contiguous()
        raw = json.loads((source / "config.json").read_text())
        own = {"quantization_config": dict(self.config)}
        for path, tensors, config in ((plain, dense, raw), (folder, stored, {**raw, **own})):
            path.mkdir(parents=True)
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
            (path / "config.json").write_text(json.dumps(config))
        if self.file is not None:
            (folder / "config.json").write_text(json.dumps(raw))
            (folder / self.file).write_text(json.dumps({"quantization": dict(self.config)}))


def _stacked(name: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """A module's weight and those that it is stacked with."""
    parts = name.split(".")
    beside = next((names for names in STACKED if parts[-2] in names), parts[-2:-1])
    names = (".".join((*parts[:-2], each, parts[-1])) for each in beside)
    return [tensors[each] for each in names if each in tensors]


def _groups(weight: Tensor) -> Tensor:
    return weight.unflatten(1, (-1, GROUP))


def _integers(weight: Tensor, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes from 0 to 15 `[out, in]`, scales in float16 and zero points `[out, groups]`."""
    groups = _groups(weight).numpy()
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.full(scales.shape, 8) if symmetric else np.rint(-low / scales.astype(np.float32))
    codes = np.rint(groups / scales[..., None].astype(np.float32)) + zeros[..., None]
    return codes.clip(0, 15).astype(int).reshape(weight.shape), scales, zeros.astype(int)


def _values(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensor:
    repeated = (np.repeat(x, GROUP, 1) for x in (scales.astype(np.float32), zeros))
    scale, zero = repeated
    return torch.from_numpy(((codes - zero).astype(np.float32) * scale).astype(np.float32))


def _words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit numbers of a row per int32: the one at `order[i]` has the bits from 4 i on."""
    eights = numbers.reshape(len(numbers), -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for i, place in enumerate(order):
        words |= eights[:, :, place] << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def awq(weight: Tensor, _largest: Tensor) -> tuple[Parts, Tensor]:
    codes, scales, zeros = _integers(weight, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": _words(codes.T, order),
        "qzeros": _words(zeros.T, order),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return parts, _values(codes, scales, zeros)


def gptq(act_order: bool, less: int) -> Callable[[Tensor, Tensor], tuple[Parts, Tensor]]:
    """`less`: what is taken from a zero point before it is stored."""

    def quantize(weight: Tensor, _largest: Tensor) -> tuple[Parts, Tensor]:
        columns = torch.arange(weight.shape[1])
        if act_order:
            columns = columns.flip(0)
        codes, scales, zeros = _integers(weight[:, columns], symmetric=True)
        dense = torch.empty_like(weight)
        dense[:, columns] = _values(codes, scales, zeros)
        placed = np.empty_like(codes)
        placed[:, columns.numpy()] = codes
        groups = torch.empty(weight.shape[1], dtype=torch.int32)
        groups[columns] = (torch.arange(weight.shape[1]) // GROUP).int()
        parts = {
            "qweight": _words(placed).T,
            "qzeros": _words(zeros.T - less),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": groups,
        }
        return parts, dense

    return quantize


def modelopt_fp8(weight: Tensor, largest: Tensor) -> tuple[Parts, Tensor]:
    scale = largest / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}
    return parts, codes.float() * scale


def fp8_blocks(weight: Tensor, _largest: Tensor) -> tuple[Parts, Tensor]:
    """Blocks of 24 x 20, which leave the last ones smaller."""
    rows, columns = (
        torch.arange(n) // size for n, size in zip(weight.shape, (24, 20), strict=True)
    )
    scales = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
    spread = scales[rows][:, columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def modelopt_nvfp4(weight: Tensor, largest: Tensor) -> tuple[Parts, Tensor]:
    whole = largest / (6 * 448)
    scales = (_groups(weight).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    spread = (scales.float() * whole).repeat_interleave(GROUP, 1)
    ratios = (weight / spread).nan_to_num().numpy()
    codes = np.abs(np.abs(ratios)[..., None] - FP4).argmin(-1)
    dense = torch.from_numpy(FP4[codes] * np.where(ratios < 0, -1, 1).astype(np.float32)) * spread
    codes = (codes + 8 * (ratios < 0)).astype(np.uint8)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    return parts, dense


def compressed(
    layout: str, scale_dtype: torch.dtype = torch.float32, **weights: Any
) -> Callable[[Tensor, Tensor], tuple[Parts, Tensor]]:
    """Compress and decompress as the library does; scales are by the largest of each group."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    codec = BaseCompressor.get_value_from_registry(layout)

    def quantize(weight: Tensor, _largest: Tensor) -> tuple[Parts, Tensor]:
        given = _observed(weight, scheme.weights, scale_dtype)
        parts = codec.compress({"weight": weight, **given}, scheme)
        # The library rounds products to the dtype of the scales.
        exact = {**parts, "weight_scale": parts["weight_scale"].float()}
        return parts, codec.decompress(exact, scheme)["weight"].float()

    return quantize


def _observed(weight: Tensor, weights: Any, dtype: torch.dtype) -> Parts:
    """The scales of a weight, and zero points if they are asked for."""
    grouped = _groups(weight) if weights.group_size else weight[:, None]
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    largest = torch.maximum(high, -low)
    if weights.type == "float" and weights.num_bits == 4:
        whole = 6 * 448 / weight.abs().max()
        scales = (largest / 6 * whole).to(torch.float8_e4m3fn).float()
        return {"weight_scale": scales, "weight_global_scale": whole.reshape(1)}
    if weights.type == "float":
        return {"weight_scale": (largest / 448).to(dtype)}
    most = 2 ** (weights.num_bits - 1) - 1
    if weights.symmetric:
        return {"weight_scale": (largest / most).to(dtype)}
    scales = ((high - low) / (2 * most + 1)).to(dtype)
    zeros = (-low / scales.float()).round().to(torch.int8) - most - 1
    return {"weight_scale": scales, "weight_zero_point": zeros}


def _ct(layout: str, dtype: torch.dtype = torch.float32, **weights: Any) -> Exporter:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Exporter(config, compressed(layout, dtype, **weights))


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
_NVFP4 = {"quant_algo": "NVFP4", "group_size": GROUP, "exclude_modules": ["lm_head"]}
EXPORTERS: Mapping[str, Exporter] = {
    "W4A16": _ct("pack-quantized", symmetric=True, **_INT4),
    "W4A16-short-scales": _ct("pack-quantized", torch.bfloat16, symmetric=True, **_INT4),
    "W4A16-zero-points": _ct("pack-quantized", symmetric=False, **_INT4),
    "W8A16": _ct("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "FP8": _ct("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    "INT8": _ct("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "NVFP4": _ct("nvfp4-pack-quantized", symmetric=True, **_FLOAT4),
    "ModelOpt-FP8": Exporter({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt_fp8),
    "ModelOpt-NVFP4": Exporter({"quant_method": "modelopt", **_NVFP4}, modelopt_nvfp4),
    "ModelOpt-NVFP4-own-file": Exporter(_NVFP4, modelopt_nvfp4, file="hf_quant_config.json"),
    "FP8-blocks": Exporter({"quant_method": "fp8", "weight_block_size": [24, 20]}, fp8_blocks),
    "AWQ": Exporter({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, awq),
    "GPTQ": Exporter(_GPTQ, gptq(act_order=False, less=1)),
    "GPTQ-act-order": Exporter({**_GPTQ, "desc_act": True}, gptq(True, less=1)),
    "GPTQ-v2": Exporter({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(False, less=0)),
}

# Targets, with the lm_head.
TARGETS: Mapping[str, Exporter] = {
    "NVFP4": Exporter(
        {"quant_method": "modelopt", **_NVFP4, "exclude_modules": ["*embed_tokens*"]},
        modelopt_nvfp4,
        keep=("norm", "embed"),
    ),
}
