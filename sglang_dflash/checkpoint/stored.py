"""The tensors that the files of a checkpoint hold, from the headers of its safetensors files. No
torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from sglang_dflash.checkpoint.fields import read_json_object
from sglang_dflash.checkpoint.heads import is_table
from sglang_dflash.common.errors import ConfigError, cut, shown

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class StoredTensor(NamedTuple):
    """A tensor as a header describes it; `dtype` is safetensors' name, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: str | Path, role: str = "draft") -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by name, from the headers.

    Args:
        role: whose checkpoint it is, for messages.

    Raises:
        ConfigError: there is no safetensors file, one is damaged, two hold the same name, or the
            index names one that is not there.
    """
    if (Path(folder) / INDEX).is_file():
        _check_index(role, Path(folder))
    tensors = {}
    for name, stored, opened in each_tensor(folder, framework="numpy", role=role):
        tensor = opened.get_slice(stored)
        tensors[name] = StoredTensor(tensor.get_dtype(), tuple(tensor.get_shape()))
    return tensors


def each_tensor(
    folder: str | Path, *, framework: str, role: str = "draft"
) -> Iterator[tuple[str, str, Any]]:
    """Name, stored name and open file of every tensor of the checkpoint in `folder`.

    Args:
        framework: what `safetensors.safe_open` makes tensors of, "pt" or "numpy".
        role: whose checkpoint it is, for messages.

    Raises:
        ConfigError: as `stored_tensors`, but for the index.
    """
    field, path = f"{role} checkpoint", str(folder)
    files = named_files(folder, "*.safetensors")
    if not files:
        others = [file.name for file in named_files(folder, *_PICKLES)]
        only = f", only {others[0]}{and_more(others)}" if others else ""
        required = f"no .safetensors file in it{only}; weights are read from safetensors files"
        raise ConfigError(field, path, required)
    files_by_name: dict[str, Path] = {}
    for file in files:
        with _opened(field, file, framework) as opened:
            for stored in opened.keys():  # noqa: SIM118 - the handle does not iterate
                name = plain_name(stored)
                if name in files_by_name:
                    second = f"in two files, the second is {file.name}"
                    twice = f"twice in {file.name}, under two spellings"
                    raise ConfigError(field, name, twice if files_by_name[name] == file else second)
                files_by_name[name] = file
                yield name, stored, opened


def plain_name(stored: str) -> str:
    """The name of a draft's tensor, without what some exports add: `model.` before it, and
    `.weight` behind that of a head's table, as of an embedding."""
    name = stored.removeprefix("model.")
    table = name.removesuffix(".weight")
    return table if is_table(table) else name


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds weights of any format."""
    return bool(named_files(folder, "*.safetensors", *_PICKLES))


def local_weight_bytes(role: str, folder: Path) -> int | None:
    """Bytes of the safetensors weights in `folder`: their index's total, or else the size of the
    files. None if there are none.

    Raises:
        ConfigError: a file is damaged, or the index names one that is not there.
    """
    files = named_files(folder, "*.safetensors")
    for file in files:
        with _opened(f"{role} checkpoint", file, "numpy"):
            pass
    total = _check_index(role, folder, bool(files)) if (folder / INDEX).is_file() else 0
    return total or sum(file.stat().st_size for file in files) or None


def _check_index(role: str, folder: Path, has_files: bool = True) -> int:
    """The bytes of the index's tensors, 0 if it does not tell.

    Raises:
        ConfigError: the index is not JSON, one of its fields is of another type, or with
            `has_files` a file that it names is not there.
    """
    field, index = f"{role} checkpoint", read_json_object(folder / INDEX, f"{role} checkpoint")
    names, metadata = index.get("weight_map") or {}, index.get("metadata") or {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        required = "an object of tensor names and file names is required"
        raise ConfigError(f"weight_map of {INDEX}", names, required)
    if not isinstance(metadata, dict):
        raise ConfigError(f"metadata of {INDEX}", metadata, "an object of fields is required")
    absent = [name for name in sorted(set(names.values())) if not isfile(folder / name)]
    if absent and has_files:
        required = f"{INDEX} names {shown(absent[0])}{and_more(absent)}; download what is missing"
        raise ConfigError(field, str(folder), required)
    total = metadata.get("total_size")
    return int(total) if isinstance(total, int | float) and 0 < total < 2**63 else 0


def named_files(folder: str | Path, *patterns: str) -> list[Path]:
    """Files of such names, links and folders included."""
    return sorted(file for pattern in patterns for file in Path(folder).glob(pattern))


@contextmanager
def _opened(field: str, file: Path, framework: str) -> Iterator[Any]:
    if not file.is_file():
        problem = "a folder" if file.is_dir() else "a link to a file that is not there"
        raise ConfigError(field, str(file), f"{problem}; a safetensors file is required")
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        required = f"truncated or damaged ({cut(str(error))}); download it again"
        raise ConfigError(field, str(file), required) from error


def and_more(names: list[str]) -> str:
    """Return how many names follow the first, in words."""
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
