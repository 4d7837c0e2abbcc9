"""What is known of a model without its weights, from a local folder, the facts shipped here, or the
config.json on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.fields import read_json_object
from sglang_dflash.checkpoint.hub import fetch_config

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class ModelFacts:
    """One target or draft.

    Attributes:
        config: its config.json, or the fields of it that are read here; None if only the KV bytes
            are known.
        weight_bytes: bytes of its weights as served; None if unknown.
        kv_bytes_per_token: stated directly if there is no config.
        source: where the facts were read.
        unknown: fields of the config.json that serving needs and that the source does not show.
        file: the shipped file with these facts; None if they are not shipped.
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
    """The published drafts. `announced` names targets whose draft is not published yet."""

    pairs: tuple[Pair, ...]
    announced: tuple[str, ...]
    source: str


@cache
def collection() -> Collection:
    """The collection of published drafts, from the file beside this one."""
    raw = json.loads((FOLDER / "collection.json").read_text())
    pairs = tuple(
        Pair(p["target"], tuple(p["drafts"]), p["model_type"], p["hybrid"]) for p in raw["pairs"]
    )
    return Collection(pairs, tuple(raw["announced"]), raw["source"])


@cache
def shipped(kind: str) -> Mapping[str, ModelFacts]:
    """The shipped facts of that kind, "target" or "draft", by model name."""
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
    """Facts of the target or draft `name`: a folder, a shipped name or, unless `offline`, a hub
    name.

    Raises:
        ConfigError: nothing is known under that name, or its config.json cannot be fetched or read.
    """
    if Path(name).is_dir():
        return _of_folder(kind, Path(name))
    if name in shipped(kind):
        return shipped(kind)[name]
    if offline:
        names = ", ".join(shipped(kind))
        raise ConfigError(
            f"{kind.upper()}: {name!r} is neither a folder here nor a {kind} with shipped facts; "
            f"those are {names}"
        )
    return ModelFacts(
        name=name,
        config=read_json_object(fetch_config(kind, name), kind.upper()),
        weight_bytes=None,
        kv_bytes_per_token=None,
        source=f"config.json of {name} on the hub",
    )


def _of_folder(kind: str, folder: Path) -> ModelFacts:
    return ModelFacts(
        name=str(folder),
        config=read_json_object(folder / "config.json", kind.upper()),
        weight_bytes=_weight_bytes(kind, folder),
        kv_bytes_per_token=None,
        source=f"config.json and weight files in {folder}",
    )


def _weight_bytes(kind: str, folder: Path) -> int | None:
    """Bytes of the safetensors weights: their index's total, or else the size of the files. None
    if there are no weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = read_json_object(index, kind.upper()).get("metadata", {}).get("total_size")
        if isinstance(total, int):
            return total
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
