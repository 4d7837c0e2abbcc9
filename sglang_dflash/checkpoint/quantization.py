"""Storage of a quantized draft's weights, by its `quantization_config`: the tensors that a module
has in place of a weight, and the weight's shape. `drafting/dequantize.py` has the values. No torch
here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.checkpoint.fields import NEUTRAL, Fields, is_int, read_json_object
from sglang_dflash.checkpoint.heads import is_table

# The keys of config.json that declare a quantization: today's, and an early one of
# compressed-tensors.
NAMES = ("quantization_config", "compression_config")


class Declared(NamedTuple):
    """The format that a `quantization_config` declares for one group of modules.

    Attributes:
        method, layout: such as "compressed-tensors" and "pack-quantized".
        bits: of a weight.
        block: rows and columns that share a scale; None if it is not declared.
    """

    method: str
    layout: str
    bits: int
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.layout} ({self.bits} bits)"


@dataclass(frozen=True)
class Format:
    """One way to store a module's weight `[out, in]` as quantized numbers, its codes, and scales.

    Attributes:
        declared: the (method, layout) pairs that stand for it.
        bits: of a code, those that are served.
        codes: the tensor that a module has if it is stored so, of that dtype.
        scales: the tensors that have to be beside it.
        optional: the tensors that may be beside it, too.
        shape: the weight's shape, of the codes' shape and the bits of a code.
    """

    name: str
    declared: frozenset[tuple[str, str]]
    bits: tuple[int, ...]
    codes: str
    dtypes: tuple[str, ...]
    scales: tuple[str, ...]
    shape: Callable[[tuple[int, ...], int], tuple[int, ...]]
    optional: tuple[str, ...] = ()

    def recognizes(self, declared: Declared) -> bool:
        return declared[:2] in self.declared and declared.bits in self.bits

    def module(self, tensor: str, dtype: str) -> str | None:
        """The module whose codes that tensor is; None if it is none."""
        if dtype not in self.dtypes:
            return None
        if self.codes == "weight" and is_table(tensor):
            return tensor
        module, _, last = tensor.rpartition(".")
        return module if last == self.codes else None


def _pairs(method: str, *layouts: str) -> frozenset[tuple[str, str]]:
    return frozenset((method, layout) for layout in layouts)


_CT = "compressed-tensors"
FORMATS = (
    Format(
        "packed", _pairs(_CT, "pack-quantized"), (4, 8), "weight_packed", ("I32",),
        ("weight_scale", "weight_shape"), lambda codes, bits: (codes[0], codes[1] * 32 // bits),
        optional=("weight_zero_point", "weight_g_idx"),
    ),
    Format(
        "scaled",
        _pairs(_CT, "float-quantized", "int-quantized", "naive-quantized")
        | _pairs("modelopt", "FP8") | _pairs("fp8", "per tensor"),
        (8,), "weight", ("F8_E4M3", "I8"), ("weight_scale",), lambda codes, _: codes,
    ),
    Format(
        "inverse scaled", _pairs("fp8", "blocks"), (8,), "weight", ("F8_E4M3",),
        ("weight_scale_inv",), lambda codes, _: codes,
    ),
    Format(
        "nvfp4 packed", _pairs(_CT, "nvfp4-pack-quantized"), (4,), "weight_packed", ("U8",),
        ("weight_scale", "weight_global_scale"), lambda codes, _: (codes[0], 2 * codes[1]),
    ),
    Format(
        "nvfp4", _pairs("modelopt", "NVFP4", "W4A16_NVFP4"), (4,), "weight", ("U8",),
        ("weight_scale", "weight_scale_2"), lambda codes, _: (codes[0], 2 * codes[1]),
    ),
    Format(
        "awq", _pairs("awq", "gemm"), (4,), "qweight", ("I32",), ("qzeros", "scales"),
        lambda codes, bits: (codes[1] * 32 // bits, codes[0]),
    ),
    Format(
        "gptq", _pairs("gptq", "gptq", "gptq_v2"), (4, 8), "qweight", ("I32",),
        ("qzeros", "scales"), lambda codes, bits: (codes[1], codes[0] * 32 // bits),
        optional=("g_idx",),
    ),
)  # fmt: skip


class Stored(NamedTuple):
    """The storage format of some of a draft's modules, and its declaration in the config."""

    format: Format
    declared: Declared


@dataclass(frozen=True)
class Quantization:
    """Every way in which modules of one draft are stored. Others have a plain weight: its tensors
    tell, whatever the config leaves out by name."""

    ways: tuple[Stored, ...]

    def __str__(self) -> str:
        return " and ".join(str(way.declared) for way in self.ways)

    def modules(self, dtypes: Mapping[str, str]) -> Iterator[tuple[str, Stored]]:
        """The modules that are quantized.

        Args:
            dtypes: of all tensors, as safetensors names them.
        """
        for tensor, dtype in dtypes.items():
            for way in self.ways:
                if (module := way.format.module(tensor, dtype)) is not None:
                    yield module, way


def part(module: str, tensor: str) -> str:
    """The plain name of a module's tensor: that of a head's table is the name of the module."""
    return module if tensor == "weight" and is_table(module) else f"{module}.{tensor}"


# -- the config ------------------------------------------------------------------------------------


def read_quantization(fields: Fields) -> Quantization | None:
    """The quantization of a draft's config.json; None without one.

    Raises:
        UnsupportedDraft: weights are stored in another way than `FORMATS` has.
    """
    name = next((name for name in NAMES if fields.get(name) not in NEUTRAL), None)
    if name is None:
        return None
    section = Fields(_object(fields.get(name)), {}, f"{fields.path(name)}.", fields.file)
    method = _method(section)
    read = _METHODS.get(method)
    declared = [] if read is None else read(section, method)
    ways = list[Stored]()
    for group in dict.fromkeys(declared):
        matching = [row for row in FORMATS if row.recognizes(group)]
        if not matching:
            raise fields.unsupported(name, f"not served here: weights of {group}")
        if any(way.format is matching[0] for way in ways):
            # A module's tensors would not tell which of the two it has.
            required = f"not served here: two kinds of {group.method} {group.layout}"
            raise fields.unsupported(name, required)
        ways.append(Stored(matching[0], group))
    if not ways:
        methods = ", ".join(_METHODS)
        raise fields.unsupported(name, f"a quantized draft; served here are {methods}")
    return Quantization(tuple(ways))


def with_quantization(
    raw: Mapping[str, Any], folder: str | Path, role: str = "draft"
) -> Mapping[str, Any]:
    """Add what ModelOpt may write beside a config.json, in a file of its own, to the parsed config,
    unless the config itself declares a quantization. Raises ConfigError."""
    file = Path(folder) / "hf_quant_config.json"
    if any(raw.get(name) not in NEUTRAL for name in NAMES) or not file.is_file():
        return raw
    section = _object(read_json_object(file, f"{role} checkpoint").get("quantization"))
    return {**raw, NAMES[0]: section} if section.get("quant_algo") else raw


def _method(section: Fields) -> str:
    """The exporter, such as "modelopt", whatever of its names the config has."""
    unnamed = "modelopt" if _modelopt_fields(section).get("quant_algo") else ""
    name = str(section.get("quant_method", unnamed)).replace("_", "-")
    return "modelopt" if name.startswith("modelopt") else name


def _compressed_tensors(section: Fields, method: str) -> list[Declared]:
    """A layout for every group of modules, its own or the one at the top."""
    declared = []
    # A rotation, or a mask of zeros, would have to be undone.
    for name, neutral in (("transform_config", None), ("sparsity_config", "dense")):
        change = _object(section.get(name))
        if change and (neutral is None or change.get("format", neutral) != neutral):
            raise section.unsupported(name, "not served here")
    for group in _object(section.get("config_groups")).values():
        weights = _object(_object(group).get("weights"))
        if weights:
            layout = _object(group).get("format") or section.get("format")
            block = weights.get("block_structure")
            declared.append(
                Declared(method, str(layout), _bits(weights.get("num_bits")), _two(block))
            )
    return declared


def _modelopt(section: Fields, method: str) -> list[Declared]:
    """One algorithm for all modules, or by module, if it is mixed."""
    fields = _modelopt_fields(section)
    algorithms = [fields.get("quant_algo")]
    if algorithms == ["MIXED_PRECISION"]:
        layers = _object(fields.get("quantized_layers")).values()
        algorithms = [_object(layer).get("quant_algo") for layer in layers]
    return [Declared(method, str(name), 8 if name == "FP8" else 4) for name in algorithms]


def _modelopt_fields(section: Fields) -> Mapping[str, Any]:
    """Return ModelOpt's fields; those of `hf_quant_config.json` are one level deeper."""
    return _object(section.get("quantization")) or section.values


def _awq(section: Fields, method: str) -> list[Declared]:
    if section.get("zero_point", True) is not True:
        raise section.unsupported("zero_point", "weights without zero points are not served here")
    layout = str(section.get("version", "gemm")).lower()
    return [Declared(method, layout, _bits(section.get("bits", section.get("w_bit"))))]


def _gptq(section: Fields, method: str) -> list[Declared]:
    if section.get("dynamic"):
        raise section.unsupported("dynamic", "other bits for some modules are not served here")
    layout = (
        "marlin" if section.get("is_marlin_format") else section.get("checkpoint_format", "gptq")
    )
    return [Declared(method, str(layout), _bits(section.get("bits")))]


def _fp8(section: Fields, method: str) -> list[Declared]:
    block = section.get("weight_block_size")
    return [Declared(method, "per tensor" if block is None else "blocks", 8, _two(block))]


_METHODS: Mapping[str, Callable[[Fields, str], list[Declared]]] = {
    _CT: _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
}


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _bits(value: Any) -> int:
    return value if is_int(value) else 0


def _two(value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None if it is none."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(is_int, value)):
        return (value[0], value[1]) if min(value) > 0 else None
    return None
