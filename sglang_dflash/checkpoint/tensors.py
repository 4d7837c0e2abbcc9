"""The tensors of a draft: their names and shapes, and whether those of a checkpoint are these, with
the values of trained weights. No torch here.

A draft with NaN or a matrix of zeros would be served: its proposals are rejected, so outputs stay
exact, at the speed of plain decoding or less. Files are mapped, and read once at the speed of
memory or disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.quantization import Stored, part
from sglang_dflash.checkpoint.stored import (
    StoredTensor,
    and_more,
    each_tensor,
    named_files,
    plain_name,
    stored_tensors,
)
from sglang_dflash.checkpoint.vocabulary import D2T, T2D, check_map, token_ids
from sglang_dflash.common.errors import ConfigError

# A trained embedding of the mask token, which some training code writes beside the weights.
MASK_EMBEDDING = "mask_embedding.pt"
# dtype of a draft's weights in a header -> the unsigned integer of its width, and the bits of
# infinity. With the sign bit cleared, the bits of finite numbers are below those of infinity, and
# the bits of NaN above. dtypes of fewer bits are of quantized weights and their scales.
_BITS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
# Ends of the names of tensors that change nothing here: scales of activations and of K/V that
# quantized drafts may have, and what old versions of Transformers computed of the config.
HARMLESS = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale",
    ".rotary_emb.inv_freq",
)  # fmt: skip
# In FP8 no bits are infinity, and one number is NaN.
_FLOATS = {**_BITS, "F8_E4M3": ("<u1", 0x7F)}
# Elements whose values are looked at together: they stay in the CPU's cache.
_CHUNK = 1 << 18


class Part(NamedTuple):
    """A tensor of a checkpoint, as a part of one of our parameters.

    Attributes:
        split: how ranks share it: "rows", "kv rows" (with replicas), "columns"; None for whole.
    """

    name: str
    shape: tuple[int, ...]
    split: str | None = None


def layout(config: DraftConfig) -> dict[str, tuple[Part, ...]]:
    """Our parameter -> the published tensors whose rows it joins, in their order. The one place
    that knows the names of a draft's tensors, with those of its head (`HeadConfig.tensors`)."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    matrices: dict[str, tuple[Part, ...]] = {
        "qkv_proj": (
            Part("self_attn.q_proj", (q, width), "rows"),
            Part("self_attn.k_proj", (kv, width), "kv rows"),
            Part("self_attn.v_proj", (kv, width), "kv rows"),
        ),
        "o_proj": (Part("self_attn.o_proj", (width, q), "columns"),),
        "gate_up_proj": (
            Part("mlp.gate_proj", (inner, width), "rows"),
            Part("mlp.up_proj", (inner, width), "rows"),
        ),
        "down_proj": (Part("mlp.down_proj", (width, inner), "columns"),),
        "input_layernorm": (Part("input_layernorm", (width,)),),
        "post_attention_layernorm": (Part("post_attention_layernorm", (width,)),),
        "q_norm": (Part("self_attn.q_norm", (dim,)),),
        "k_norm": (Part("self_attn.k_norm", (dim,)),),
    }
    # Every rank holds the whole of a bias that is added after the sum.
    biases = {
        ours: tuple(
            Part(name, shape[:1], None if split == "columns" else split)
            for name, shape, split in matrices[ours]
        )
        for ours in (("qkv_proj", "o_proj") if config.attention_bias else ())
    }
    whole = {"fc": (width, config.target_hidden_width), "hidden_norm": (width,), "norm": (width,)}
    parameters: dict[str, tuple[Part, ...]] = {
        f"{name}.weight": (Part(f"{name}.weight", shape),) for name, shape in whole.items()
    }
    if config.draft_vocab_size is not None:
        rows = (config.draft_vocab_size, width)
        parameters["lm_head.weight"] = (Part("lm_head.weight", rows, "rows"),)
    parameters |= {
        f"head.{name}": (Part(name, shape),) for name, shape in config.head.tensors(config).items()
    }
    for i in range(config.num_hidden_layers):
        for suffix, modules in (("weight", matrices), ("bias", biases)):
            for ours, parts in modules.items():
                parameters[f"layers.{i}.{ours}.{suffix}"] = tuple(
                    part._replace(name=f"layers.{i}.{part.name}.{suffix}") for part in parts
                )
    return parameters


def fused_tensors(config: DraftConfig) -> dict[str, tuple[Part, ...]]:
    """The name that an export may have in place of several tensors -> these, whose rows it joins:
    `self_attn.qkv_proj` and `mlp.gate_up_proj`."""
    fused = {}
    for ours, parts in layout(config).items():
        if len(parts) > 1:
            module, tensor = ours.split(".")[-2:]
            block = parts[0].name.split(".")[:-2]
            fused[".".join((*block, module, tensor))] = parts
    return fused


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a draft, in the published layout."""
    return {part.name: part.shape for parts in layout(config).values() for part in parts}


# -- what is checked of a draft's weights


def check_weights(config: DraftConfig, folder: str | Path) -> None:
    """Raise ConfigError unless `folder` holds the tensors of the config, with values of trained
    weights.

    `generate` and servers refuse a draft by this function, and `sglang-dflash inspect` a local one.
    """
    check_embedding(folder)
    check_tensors(config, stored_tensors(folder))
    check_values(config, folder)


def check_embedding(folder: str | Path) -> None:
    """Raise ConfigError if the draft has a trained mask embedding beside its weights."""
    if (Path(folder) / MASK_EMBEDDING).exists():
        raise ConfigError(
            "draft checkpoint",
            str(folder),
            f"{MASK_EMBEDDING} in it, a trained mask embedding, is not served, and acceptance "
            "would be low without it. SGLang's own worker reads it: "
            "--speculative-dflash-worker builtin",
        )


def check_tensors(
    config: DraftConfig, tensors: Mapping[str, StoredTensor], is_part: bool = False
) -> None:
    """Raise ConfigError if a tensor is missing or unexpected, or not of the config's shape or of
    floating point. A quantized module's stand for its weight.

    Args:
        is_part: whether tensors may be left out, and those of the vocabulary are another's matter.
            They are the weights themselves, neither quantized nor fused.
    """
    expected = expected_tensors(config)
    if not is_part:
        tensors = plain_tensors(config, tensors)
    missing = [name for name in expected if name not in tensors]
    if missing and not is_part:
        raise ConfigError(_tensor(missing[0]), required=f"missing{and_more(missing)}")
    expected = {name: shape for name, shape in expected.items() if name in tensors}
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            stored_shape = list(tensors[name].shape)
            raise ConfigError(_tensor(name), stored_shape, f"the config asks for {list(shape)}")
    # Copies of the target's embedding and head are ignored: the draft borrows the target's.
    allowed = {*expected, "embed_tokens.weight", "lm_head.weight"}
    allowed |= {D2T, T2D} if is_part else check_map(config, tensors)
    unexpected = sorted(tensors.keys() - allowed)
    if unexpected:
        required = f"no draft of this config has this tensor{and_more(unexpected)}"
        raise ConfigError("draft checkpoint", unexpected[0], required)
    for name in expected:
        if tensors[name].dtype not in _BITS:
            required = f"one of {', '.join(_BITS)} is required"
            raise ConfigError(f"dtype of {_tensor(name)}", tensors[name].dtype, required)


def plain_tensors(
    config: DraftConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors that a draft uses, as if no module were quantized or fused with others.
    Raises ConfigError if a quantized module lacks a tensor."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(HARMLESS)}
    plain = _dequantized(config, plain)
    for name, parts in fused_tensors(config).items():
        rows = sum(part.shape[0] for part in parts)
        if name in plain and plain[name].shape == (rows, *parts[0].shape[1:]):
            dtype = plain.pop(name).dtype
            plain |= {part.name: StoredTensor(dtype, part.shape) for part in parts}
    return plain


def quantized_modules(
    config: DraftConfig, tensors: Mapping[str, StoredTensor]
) -> list[tuple[str, Stored]]:
    """The modules that are quantized, and how; whatever the config leaves out by name."""
    if config.quantization is None:
        return []
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return list(config.quantization.modules(dtypes))


def _dequantized(config: DraftConfig, plain: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    for module, (form, declared) in quantized_modules(config, plain):
        names = {name: part(module, name) for name in (form.codes, *form.scales, *form.optional)}
        missing = [names[name] for name in form.scales if names[name] not in plain]
        if missing:
            raise ConfigError(_tensor(missing[0]), required=f"missing{and_more(missing)}")
        shape = plain[names[form.codes]].shape
        if len(shape) != 2:
            raise ConfigError(_tensor(names[form.codes]), list(shape), "a matrix is required")
        plain = {name: tensor for name, tensor in plain.items() if name not in names.values()}
        plain[part(module, "weight")] = StoredTensor("F32", form.shape(shape, declared.bits))
    return plain


def check_values(config: DraftConfig, folder: str | Path) -> None:
    """Raise ConfigError if a tensor of the draft holds NaN or Inf, a weight is all zeros, or its
    vocabulary is none.

    Biases may be zeros. The tensors are those that `check_tensors` has accepted.
    """
    if config.draft_vocab_size is not None:
        maps = each_tensor(folder, framework="numpy")
        token_ids(config, {n: f.get_tensor(stored) for n, stored, f in maps if n in (D2T, T2D)})
    names = expected_tensors(config).keys() | fused_tensors(config).keys() | _scales(config, folder)
    for name, dtype, bits in _mapped(folder):
        if name not in names:
            continue
        infinity = _FLOATS[dtype][1]
        largest = max((int(chunk.max()) for chunk in _magnitudes(bits)), default=0)
        if largest >= infinity:
            broken = sum(int((chunk >= infinity).sum()) for chunk in _magnitudes(bits))
            required = f"{broken} of {len(bits)} values are NaN or infinite; finite ones are"
            raise ConfigError(_tensor(name), required=f"{required} required")
        if largest == 0 and name.endswith(".weight"):
            raise ConfigError(_tensor(name), required="all zeros; trained weights are required")


def _scales(config: DraftConfig, folder: str | Path) -> set[str]:
    """The scales of a draft's quantized weights."""
    modules = quantized_modules(config, stored_tensors(folder))
    return {part(module, name) for module, way in modules for name in way.format.scales}


def _mapped(folder: str | Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype, and bits as unsigned integers `[N]` of the tensors with a dtype of `_FLOATS`.
    The headers are valid: `stored_tensors` has read them."""
    for file in named_files(folder, "*.safetensors"):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        data = np.memmap(file, dtype=np.uint8, mode="r")[8 + size :]
        for stored, tensor in header.items():
            if stored == "__metadata__" or tensor["dtype"] not in _FLOATS:
                continue
            begin, end = tensor["data_offsets"]
            bits = data[begin:end].view(_FLOATS[tensor["dtype"]][0])
            yield plain_name(stored), tensor["dtype"], bits


def _magnitudes(bits: np.ndarray) -> Iterator[np.ndarray]:
    """The same with the sign bit cleared, in chunks."""
    mask = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return (bits[i : i + _CHUNK] & mask for i in range(0, len(bits), _CHUNK))


def _tensor(name: str) -> str:
    return f"tensor {name} of the draft"
