"""The tensors of a checkpoint, from its safetensors files: which ones a draft has, what
the headers say, and whether the values are those of trained weights. No torch here.

A draft with NaN or a matrix of zeros would be served: its proposals are rejected, so outputs stay
exact, at the speed of plain decoding or less. Files are mapped, and read once at the speed of
memory or disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError, cut, shown
from sglang_dflash.facts.fields import read_json_object
from sglang_dflash.facts.vocabulary import D2T, T2D, check_map, token_ids

INDEX = "model.safetensors.index.json"
# A trained embedding of the mask token, which some training code writes beside the weights.
MASK_EMBEDDING = "mask_embedding.pt"
# dtype of a draft's weights in a header -> the unsigned integer of its width, and the bits of
# infinity. With the sign bit cleared, the bits of finite numbers are below those of infinity, and
# the bits of NaN above. dtypes of fewer bits need scales, which our drafts do not have.
_BITS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
# Elements whose values are looked at together: they stay in the CPU's cache.
_CHUNK = 1 << 18
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class StoredTensor(NamedTuple):
    """A tensor as a header describes it; `dtype` is safetensors' name, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]


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
    that knows the names of a draft's tensors."""
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
    found: dict[str, tuple[Part, ...]] = {
        f"{name}.weight": (Part(f"{name}.weight", shape),) for name, shape in whole.items()
    }
    if config.draft_vocab_size is not None:
        rows = (config.draft_vocab_size, width)
        found["lm_head.weight"] = (Part("lm_head.weight", rows, "rows"),)
    found |= {name: (Part(name, shape),) for name, shape in _selector(config).items()}
    for i in range(config.num_hidden_layers):
        convolutions = _convolutions(config, f"layers.{i}.")
        found |= {name: (Part(name, shape),) for name, shape in convolutions.items()}
        for kind, modules in (("weight", matrices), ("bias", biases)):
            for ours, parts in modules.items():
                found[f"layers.{i}.{ours}.{kind}"] = tuple(
                    part._replace(name=f"layers.{i}.{part.name}.{kind}") for part in parts
                )
    return found


def _selector(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of a candidate selector. Every rank holds all of them."""
    if config.selector is None:
        return {}
    name, rank = "candidate_selector.", config.selector.rank
    return {
        f"{name}predecessor_codebook": (config.vocab_size, rank),
        f"{name}successor_codebook": (config.vocab_size, rank),
        f"{name}hidden_projection.weight": (rank, config.hidden_size),
    }


def _convolutions(config: DraftConfig, layer: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of a layer's convolutions. Every rank holds all of them."""
    if config.convolution is None:
        return {}
    taps, width = config.convolution.kernel_size, config.hidden_size
    kernels = 2 * taps * width // config.convolution.group_size
    return {
        f"{layer}{name}.{tensor}": shape
        for name in ("attention_conv", "mlp_conv")
        for tensor, shape in (
            ("base_kernel", (2, taps, width)),
            ("kernel_projection.weight", (kernels, width)),
        )
    }


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
    floating point.

    Args:
        is_part: whether tensors may be left out, and those of the vocabulary are another's matter.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in tensors]
    if missing and not is_part:
        raise ConfigError(_tensor(missing[0]), required=f"missing{_more(missing)}")
    expected = {name: shape for name, shape in expected.items() if name in tensors}
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise ConfigError(_tensor(name), found, f"the config asks for {list(shape)}")
    # Copies of the target's embedding and head are ignored: the draft borrows the target's.
    known = {*expected, "embed_tokens.weight", "lm_head.weight"}
    known |= {D2T, T2D} if is_part else check_map(config, tensors)
    unexpected = sorted(tensors.keys() - known)
    if unexpected:
        required = f"no draft of this config has this tensor{_more(unexpected)}"
        raise ConfigError("draft checkpoint", unexpected[0], required)
    for name in expected:
        if tensors[name].dtype not in _BITS:
            required = f"one of {', '.join(_BITS)} is required"
            raise ConfigError(f"dtype of {_tensor(name)}", tensors[name].dtype, required)


def check_values(config: DraftConfig, folder: str | Path) -> None:
    """Raise ConfigError if a tensor of the draft holds NaN or Inf, a weight is all zeros, or its
    vocabulary is none.

    Biases may be zeros. The tensors are those that `check_tensors` has accepted.
    """
    if config.draft_vocab_size is not None:
        maps = each_tensor(folder, framework="numpy")
        token_ids(config, {n: f.get_tensor(stored) for n, stored, f in maps if n in (D2T, T2D)})
    names = expected_tensors(config)
    for name, dtype, bits in _mapped(folder):
        if name not in names:
            continue
        infinity = _BITS[dtype][1]
        largest = max((int(chunk.max()) for chunk in _magnitudes(bits)), default=0)
        if largest >= infinity:
            broken = sum(int((chunk >= infinity).sum()) for chunk in _magnitudes(bits))
            required = f"{broken} of {len(bits)} values are NaN or infinite; finite ones are"
            raise ConfigError(_tensor(name), required=f"{required} required")
        if largest == 0 and name.endswith(".weight"):
            raise ConfigError(_tensor(name), required="all zeros; trained weights are required")


def _mapped(folder: str | Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype, and bits as unsigned integers `[N]` of the tensors that have a dtype in `_BITS`.
    The headers are valid: `stored_tensors` has read them."""
    for file in _named(folder, "*.safetensors"):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        data = np.memmap(file, dtype=np.uint8, mode="r")[8 + size :]
        for stored, tensor in header.items():
            if stored == "__metadata__" or tensor["dtype"] not in _BITS:
                continue
            begin, end = tensor["data_offsets"]
            bits = data[begin:end].view(_BITS[tensor["dtype"]][0])
            yield plain_name(stored), tensor["dtype"], bits


def _magnitudes(bits: np.ndarray) -> Iterator[np.ndarray]:
    """The same with the sign bit cleared, in chunks."""
    mask = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return (bits[i : i + _CHUNK] & mask for i in range(0, len(bits), _CHUNK))


def _tensor(name: str) -> str:
    return f"tensor {name} of the draft"


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


# -- what the files of a folder hold


def stored_tensors(folder: str | Path, kind: str = "draft") -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by name, from the headers.

    Args:
        kind: whose checkpoint it is, for messages.

    Raises:
        ConfigError: there is no safetensors file, one is damaged, two hold the same name, or the
            index names one that is not there.
    """
    if (Path(folder) / INDEX).is_file():
        _check_index(kind, Path(folder))
    found = {}
    for name, stored, opened in each_tensor(folder, framework="numpy", kind=kind):
        tensor = opened.get_slice(stored)
        found[name] = StoredTensor(tensor.get_dtype(), tuple(tensor.get_shape()))
    return found


def each_tensor(
    folder: str | Path, *, framework: str, kind: str = "draft"
) -> Iterator[tuple[str, str, Any]]:
    """Name, stored name and open file of every tensor of the checkpoint in `folder`.

    Args:
        framework: what `safetensors.safe_open` makes tensors of, "pt" or "numpy".
        kind: whose checkpoint it is, for messages.

    Raises:
        ConfigError: as `stored_tensors`, but for the index.
    """
    what, where = f"{kind} checkpoint", str(folder)
    files = _named(folder, "*.safetensors")
    if not files:
        others = [file.name for file in _named(folder, *_PICKLES)]
        only = f", only {others[0]}{_more(others)}" if others else ""
        required = f"no .safetensors file in it{only}; weights are read from safetensors files"
        raise ConfigError(what, where, required)
    seen: dict[str, Path] = {}
    for file in files:
        with _opened(what, file, framework) as opened:
            for stored in opened.keys():  # noqa: SIM118 - the handle does not iterate
                name = plain_name(stored)
                if name in seen:
                    second = f"in two files, the second is {file.name}"
                    twice = f"twice in {file.name}, under two spellings"
                    raise ConfigError(what, name, twice if seen[name] == file else second)
                seen[name] = file
                yield name, stored, opened


def plain_name(stored: str) -> str:
    """The name of a draft's tensor, without what some exports add: `model.` before it, and
    `.weight` behind that of a DFlash2 codebook, as of an embedding."""
    name = stored.removeprefix("model.")
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights of any format."""
    return bool(_named(folder, "*.safetensors", *_PICKLES))


def local_weight_bytes(kind: str, folder: Path) -> int | None:
    """Bytes of the safetensors weights in `folder`: their index's total, or else the size of the
    files. None if there are none.

    Raises:
        ConfigError: a file is damaged, or the index names one that is not there.
    """
    files = _named(folder, "*.safetensors")
    for file in files:
        with _opened(f"{kind} checkpoint", file, "numpy"):
            pass
    total = _check_index(kind, folder, bool(files)) if (folder / INDEX).is_file() else 0
    return total or sum(file.stat().st_size for file in files) or None


def _check_index(kind: str, folder: Path, has_files: bool = True) -> int:
    """The bytes of the index's tensors, 0 if it does not tell.

    Raises:
        ConfigError: the index is not JSON, one of its fields is of another type, or with
            `has_files` a file that it names is not there.
    """
    what, index = f"{kind} checkpoint", read_json_object(folder / INDEX, f"{kind} checkpoint")
    names, metadata = index.get("weight_map") or {}, index.get("metadata") or {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        required = "an object of tensor names and file names is required"
        raise ConfigError(f"weight_map of {INDEX}", names, required)
    if not isinstance(metadata, dict):
        raise ConfigError(f"metadata of {INDEX}", metadata, "an object of fields is required")
    absent = [name for name in sorted(set(names.values())) if not isfile(folder / name)]
    if absent and has_files:
        required = f"{INDEX} names {shown(absent[0])}{_more(absent)}; download what is missing"
        raise ConfigError(what, str(folder), required)
    total = metadata.get("total_size")
    return int(total) if isinstance(total, int | float) and 0 < total < 2**63 else 0


def _named(folder: str | Path, *patterns: str) -> list[Path]:
    """Files of such names, links and folders included."""
    return sorted(file for pattern in patterns for file in Path(folder).glob(pattern))


@contextmanager
def _opened(what: str, file: Path, framework: str) -> Iterator[Any]:
    if not file.is_file():
        found = "a folder" if file.is_dir() else "a link to a file that is not there"
        raise ConfigError(what, str(file), f"{found}; a safetensors file is required")
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        required = f"truncated or damaged ({cut(str(error))}); download it again"
        raise ConfigError(what, str(file), required) from error
