"""The tensors of a checkpoint, from the headers of its safetensors files: their names, dtypes and
shapes, and which ones a DFlash v1 draft has. Weights are not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError, cut, shown
from sglang_dflash.facts.fields import read_json_object

INDEX = "model.safetensors.index.json"
# Copies of the target's embedding and head are ignored: the draft borrows the target's.
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
# A trained embedding of the mask token, which some training code writes beside the weights.
MASK_EMBEDDING = "mask_embedding.pt"
# Of a draft's weights. Those of fewer bits need scales, which a DFlash v1 draft does not have.
_DTYPES = ("BF16", "F16", "F32", "F64")
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
    that knows the names of a DFlash v1 draft's tensors."""
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
    for i in range(config.num_hidden_layers):
        for kind, modules in (("weight", matrices), ("bias", biases)):
            for ours, parts in modules.items():
                found[f"layers.{i}.{ours}.{kind}"] = tuple(
                    part._replace(name=f"layers.{i}.{part.name}.{kind}") for part in parts
                )
    return found


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a DFlash v1 draft, in the published layout."""
    return {part.name: part.shape for parts in layout(config).values() for part in parts}


def check_shapes(config: DraftConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError if a tensor is missing, unexpected, or not of the config's shape."""
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ConfigError(
            f"draft checkpoint: tensor {missing[0]!r} is missing{_more(len(missing) - 1)}"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise ConfigError(
                f"draft checkpoint: {name} {list(shapes[name])}; the config asks for {list(shape)}"
            )
    unexpected = sorted(set(shapes) - set(expected) - set(_BORROWED))
    if unexpected:
        raise ConfigError(
            f"draft checkpoint: {len(unexpected)} tensors that no DFlash v1 draft has, "
            f"the first is {shown(unexpected[0])}"
        )


def check_tensors(config: DraftConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """As `check_shapes`, and raise ConfigError if a tensor is not of floating point."""
    check_shapes(config, {name: tensor.shape for name, tensor in tensors.items()})
    for name in expected_tensors(config):
        if tensors[name].dtype not in _DTYPES:
            raise ConfigError(
                f"draft checkpoint: {name} is of dtype {tensors[name].dtype}; one of "
                f"{', '.join(_DTYPES)} is required"
            )


def _more(count: int) -> str:
    return f", and {count} more" if count else ""


def stored_tensors(folder: str | Path, kind: str = "draft") -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by name, from the headers.

    Args:
        kind: whose checkpoint it is, for messages.

    Raises:
        ConfigError: there is no safetensors file, one is damaged, two hold the same name, the index
            names one that is not there, or a draft has a trained mask embedding.
    """
    if (Path(folder) / INDEX).is_file():
        _check_index(kind, Path(folder))
    found = {}
    for name, stored, opened in each_tensor(folder, framework="numpy", kind=kind):
        tensor = opened.get_slice(stored)
        found[name] = StoredTensor(tensor.get_dtype(), tuple(tensor.get_shape()))
    return found


def tensor_shapes(folder: str | Path, kind: str = "draft") -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, and the errors, of `stored_tensors`."""
    return {name: tensor.shape for name, tensor in stored_tensors(folder, kind).items()}


def each_tensor(
    folder: str | Path, *, framework: str, kind: str = "draft"
) -> Iterator[tuple[str, str, Any]]:
    """Name, stored name and open file of every tensor of the checkpoint in `folder`.

    Some exports prefix names with `model.`; the name given is without it.

    Args:
        framework: what `safetensors.safe_open` makes tensors of, "pt" or "numpy".
        kind: whose checkpoint it is, for messages.

    Raises:
        ConfigError: as `tensor_shapes`.
    """
    if kind == "draft" and (Path(folder) / MASK_EMBEDDING).exists():
        raise ConfigError(
            f"draft checkpoint: {MASK_EMBEDDING!r} in {str(folder)!r}: a trained mask embedding is "
            "not served, and acceptance would be low without it. SGLang's own worker reads it: "
            "--speculative-dflash-worker builtin"
        )
    files = safetensors_files(folder)
    if not files:
        others = _named(folder, *_PICKLES)
        only = f", only {others[0].name!r}{_more(len(others) - 1)}" if others else ""
        raise ConfigError(
            f"{kind} checkpoint: no .safetensors file in {shown(str(folder))}{only}; "
            "weights are read from safetensors files"
        )
    seen: set[str] = set()
    for file in files:
        with _opened(kind, file, framework) as opened:
            for stored in opened.keys():  # noqa: SIM118 - the handle does not iterate
                name = plain_name(stored)
                if name in seen:
                    raise ConfigError(
                        f"{kind} checkpoint: tensor {shown(name)} is in two files, "
                        f"the second is {file.name!r}"
                    )
                seen.add(name)
                yield name, stored, opened


def plain_name(stored: str) -> str:
    """The name of a draft's tensor, without the `model.` that some exports put before it."""
    return stored.removeprefix("model.")


def local_draft_tensors(folder: Path) -> dict[str, StoredTensor] | None:
    """`stored_tensors`, or None if the folder holds no weights of any format."""
    return stored_tensors(folder) if _named(folder, "*.safetensors", *_PICKLES) else None


def safetensors_files(folder: str | Path) -> list[Path]:
    """The safetensors files in `folder`, links and folders of such a name included."""
    return _named(folder, "*.safetensors")


def _named(folder: str | Path, *patterns: str) -> list[Path]:
    return sorted(file for pattern in patterns for file in Path(folder).glob(pattern))


def local_weight_bytes(kind: str, folder: Path) -> int | None:
    """Bytes of the safetensors weights in `folder`: their index's total, or else the size of the
    files. None if there are none.

    Raises:
        ConfigError: a file is damaged, or the index names one that is not there.
    """
    files = safetensors_files(folder)
    for file in files:
        with _opened(kind, file, "numpy"):
            pass
    if not (folder / INDEX).is_file():
        return sum(file.stat().st_size for file in files) or None
    total = _check_index(kind, folder) if files else _read_index(kind, folder)[1]
    return total or sum(file.stat().st_size for file in files) or None


def _read_index(kind: str, folder: Path) -> tuple[list[str], int]:
    """The files that the index names, and the bytes of their tensors, 0 if it does not tell.

    Raises:
        ConfigError: the index is not JSON, or one of its fields is of another type.
    """
    what, index = f"{kind} checkpoint", read_json_object(folder / INDEX, f"{kind} checkpoint")
    names, metadata = index.get("weight_map") or {}, index.get("metadata") or {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(
            f"{what}: weight_map of {INDEX}: {shown(names)}; an object of tensor names and file "
            "names is required"
        )
    if not isinstance(metadata, dict):
        raise ConfigError(
            f"{what}: metadata of {INDEX}: {shown(metadata)}; an object of fields is required"
        )
    total = metadata.get("total_size")
    named = sorted(set(names.values()))
    if isinstance(total, int | float) and 0 < total < 2**63:
        return named, int(total)
    return named, 0


def _check_index(kind: str, folder: Path) -> int:
    """`_read_index`'s bytes. Raises ConfigError, also if a file that it names is not there."""
    named, total = _read_index(kind, folder)
    absent = [name for name in named if not _is_file(folder / name)]
    if absent:
        raise ConfigError(
            f"{kind} checkpoint: {INDEX} names {shown(absent[0])}{_more(len(absent) - 1)}, which "
            f"{'are' if len(absent) > 1 else 'is'} not in {shown(str(folder))}; download it again"
        )
    return total


def _is_file(path: Path) -> bool:
    """Whether there is such a file; False for a name that the file system does not take."""
    try:
        return path.is_file()
    except OSError:
        return False


@contextmanager
def _opened(kind: str, file: Path, framework: str) -> Iterator[Any]:
    what = f"{kind} checkpoint: {shown(str(file))}"
    if not file.is_file():
        found = "a folder" if file.is_dir() else "a link to a file that is not there"
        raise ConfigError(f"{what} is {found}; a safetensors file is required")
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{what} is truncated or damaged ({cut(str(error))}); download it again"
        ) from error
