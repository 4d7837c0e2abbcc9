"""What is known of a model without its weights: from a local folder, the facts shipped here, or the hub's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.errors import ConfigError

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class ModelFacts:
    """One target or draft.

    `config`: its config.json, or the fields of it that we read (None where only the KV bytes are known).
    `weight_bytes`: bytes of its weights as served (None: unknown).
    `kv_bytes_per_token`: stated directly, where there is no config.
    `source`: where this was read.
    `unknown`: fields of the config.json that are needed to serve the model and that nobody here has seen.
    `file`: the shipped file with these facts (None: they are not shipped).
    """

    name: str
    config: Mapping[str, Any] | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    source: str
    unknown: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True)
class Pair:
    """A published target, the drafts for it, and whether it has recurrent layers."""

    target: str
    drafts: tuple[str, ...]
    model_type: str
    hybrid: bool


@dataclass(frozen=True)
class Collection:
    """The published drafts; `announced`: targets whose draft is not out."""

    pairs: tuple[Pair, ...]
    announced: tuple[str, ...]
    source: str


@cache
def collection() -> Collection:
    raw = json.loads((FOLDER / "collection.json").read_text())
    pairs = tuple(
        Pair(p["target"], tuple(p["drafts"]), p["model_type"], p["hybrid"]) for p in raw["pairs"]
    )
    return Collection(pairs, tuple(raw["announced"]), raw["source"])


@cache
def shipped(kind: str) -> Mapping[str, ModelFacts]:
    """The facts of that kind ("target" or "draft") beside this file, by model name."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        raw = json.loads(path.read_text())
        if raw["kind"] == kind:
            found[raw["name"]] = ModelFacts(
                name=raw["name"],
                config=raw.get("config"),
                weight_bytes=raw.get("weight_bytes"),
                kv_bytes_per_token=raw.get("kv_bytes_per_token"),
                source=raw["source"],
                unknown=tuple(raw.get("unknown", ())),
                file=path.name,
            )
    return found


def look_up(kind: str, name: str, *, offline: bool = False) -> ModelFacts:
    """Facts of the target or draft called `name`: a folder with config.json, a shipped name, or (not `offline`) a hub name.

    Raises:
        ConfigError: nothing is known under that name, or its config.json cannot be had or read.
    """
    if Path(name).is_dir():
        return _of_folder(kind, Path(name))
    if name in shipped(kind):
        return shipped(kind)[name]
    if offline:
        names = ", ".join(shipped(kind))
        raise ConfigError(
            f"{kind.upper()}: {name!r} is neither a folder here nor a {kind} with shipped facts; those are {names}"
        )
    return ModelFacts(
        name,
        _read_json(kind, _fetch_config(kind, name)),
        None,
        None,
        f"config.json of {name} on the hub",
    )


def _of_folder(kind: str, folder: Path) -> ModelFacts:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{kind.upper()}: no config.json in {str(folder)!r}; give a model's folder or its hub name"
        )
    return ModelFacts(
        str(folder),
        _read_json(kind, path),
        _weight_bytes(kind, folder),
        None,
        f"config.json and weight files in {folder}",
    )


def _weight_bytes(kind: str, folder: Path) -> int | None:
    """Bytes of the safetensors weights, by their index or else their sizes; None where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = _read_json(kind, index).get("metadata", {}).get("total_size")
        if isinstance(total, int):
            return total
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _read_json(kind: str, path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{kind.upper()}: {str(path)!r} is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{kind.upper()}: {str(path)!r} holds no JSON object")
    return raw


def _fetch_config(kind: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{kind.upper()}: {name!r} is neither a folder here nor a model whose config.json the hub gave ({first_line})"
        ) from error
