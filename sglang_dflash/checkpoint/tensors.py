"""The tensors of a checkpoint, from the headers of its safetensors files: their names and shapes,
and which ones a DFlash v1 draft has. Weights are not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.fields import read_json_object

INDEX = "model.safetensors.index.json"
# Copies of the target's embedding and head are ignored: the draft borrows the target's.
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
# A trained embedding of the mask token, which some training code writes beside the weights.
MASK_EMBEDDING = "mask_embedding.pt"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a DFlash v1 draft, in the published layout."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    linear = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = {
        "input_layernorm": width,
        "post_attention_layernorm": width,
        "self_attn.q_norm": dim,
        "self_attn.k_norm": dim,
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.weight": (size,) for name, size in norms.items()}
    if config.attention_bias:
        layer |= {
            f"{name}.bias": shape[:1] for name, shape in linear.items() if "self_attn" in name
        }
    return {
        "fc.weight": (width, config.target_hidden_width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **{
            f"layers.{i}.{name}": shape
            for i in range(config.num_hidden_layers)
            for name, shape in layer.items()
        },
    }


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
            f"the first is {unexpected[0]!r}"
        )


def _more(count: int) -> str:
    return f", and {count} more" if count else ""


def tensor_shapes(folder: str | Path, kind: str = "draft") -> dict[str, list[int]]:
    """Name and shape of every tensor of the checkpoint in `folder`, from the headers.

    Args:
        kind: whose checkpoint it is, for messages.

    Raises:
        ConfigError: there is no safetensors file, one is damaged, two hold the same name, or a
            draft has a trained mask embedding.
    """
    return {
        name: opened.get_slice(stored).get_shape()
        for name, stored, opened in each_tensor(folder, framework="numpy", kind=kind)
    }


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
    files = _named(folder, "*.safetensors")
    if not files:
        others = _named(folder, *_PICKLES)
        only = f", only {others[0].name!r}{_more(len(others) - 1)}" if others else ""
        raise ConfigError(
            f"{kind} checkpoint: no .safetensors file in {str(folder)!r}{only}; "
            "weights are read from safetensors files"
        )
    seen: set[str] = set()
    for file in files:
        with _opened(kind, file, framework) as opened:
            for stored in opened.keys():  # noqa: SIM118 - the handle does not iterate
                name = plain_name(stored)
                if name in seen:
                    raise ConfigError(
                        f"{kind} checkpoint: tensor {name!r} is in two files, "
                        f"the second is {file.name!r}"
                    )
                seen.add(name)
                yield name, stored, opened


def plain_name(stored: str) -> str:
    """The name of a draft's tensor, without the `model.` that some exports put before it."""
    return stored.removeprefix("model.")


def local_draft_shapes(folder: Path) -> dict[str, list[int]] | None:
    """`tensor_shapes`, or None if the folder holds no weights of any format."""
    return tensor_shapes(folder) if _named(folder, "*.safetensors", *_PICKLES) else None


def _named(folder: str | Path, *patterns: str) -> list[Path]:
    return sorted(file for pattern in patterns for file in Path(folder).glob(pattern))


def local_weight_bytes(kind: str, folder: Path) -> int | None:
    """Bytes of the safetensors weights in `folder`: their index's total, or else the size of the
    files. None if there are none.

    Raises:
        ConfigError: a file is damaged, or the index names one that is not there.
    """
    files = _named(folder, "*.safetensors")
    for file in files:
        with _opened(kind, file, "numpy"):
            pass
    if not (folder / INDEX).is_file():
        return sum(file.stat().st_size for file in files) or None
    index = read_json_object(folder / INDEX, f"{kind} checkpoint")
    if files:
        _check_index(kind, folder, index)
    total = (index.get("metadata") or {}).get("total_size")
    if isinstance(total, int | float):
        return int(total)
    return sum(file.stat().st_size for file in files) or None


def _check_index(kind: str, folder: Path, index: Mapping[str, Any]) -> None:
    named = sorted(set((index.get("weight_map") or {}).values()))
    absent = [name for name in named if not (folder / name).is_file()]
    if absent:
        raise ConfigError(
            f"{kind} checkpoint: {INDEX} names {absent[0]!r}{_more(len(absent) - 1)}, which "
            f"{'are' if len(absent) > 1 else 'is'} not in {str(folder)!r}; download it again"
        )


@contextmanager
def _opened(kind: str, file: Path, framework: str) -> Iterator[Any]:
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{kind} checkpoint: {str(file)!r} is truncated or damaged ({error}); download it again"
        ) from error
