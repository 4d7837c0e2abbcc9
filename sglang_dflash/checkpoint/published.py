"""Facts about a model without its weights, from a local folder, the facts shipped here, or the
config.json on the hub."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from os.path import exists
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.fields import check_files, read_json_object
from sglang_dflash.checkpoint.hub import check_path, fetch_config, hub_tensors
from sglang_dflash.checkpoint.quantization import with_quantization
from sglang_dflash.checkpoint.stored import (
    StoredTensor,
    has_weights,
    local_weight_bytes,
    plain_name,
    stored_tensors,
)
from sglang_dflash.common.errors import ConfigError

# `pairs`: target -> the drafts for it. `target` and `draft`: model -> its facts by the names of
# `ModelFacts`; keys of a draft's config that have no effect are left out. `others`: a draft whose
# config no source shows -> its target, and what is known.
FILE = Path(__file__).parent / "published.json"
_OTHER = {"target": "draft", "draft": "target"}


@dataclass(frozen=True)
class ModelFacts:
    """One target or draft.

    Attributes:
        config: its config.json, or the fields of it that are read here.
        weight_bytes: bytes of its weights as served; None if unknown.
        source: where the facts were read.
        unknown: fields of the config.json that serving needs and that the source does not show.
        tensors: a draft's tensors by name, from the headers of its weights; None if no weights are
            at hand.
        weights: the local folder that holds the draft's weights; None if they are not here.
    """

    name: str
    config: Mapping[str, Any]
    weight_bytes: int | None
    source: str
    unknown: tuple[str, ...] = ()
    tensors: Mapping[str, StoredTensor] | None = None
    weights: Path | None = None


@cache
def published() -> Mapping[str, Any]:
    """The shipped facts of all published models: the object that `FILE` holds."""
    return json.loads(FILE.read_text())


def published_pairs() -> Mapping[str, list[str]]:
    """Published targets, each with the drafts for it."""
    return published()["pairs"]


@cache
def shipped(role: str) -> Mapping[str, ModelFacts]:
    """The shipped facts of that kind, "target" or "draft", by model name."""
    return {
        name: ModelFacts(name=name, **{**row, "unknown": tuple(row.get("unknown", ()))})
        for name, row in published()[role].items()
    }


def repository_of(draft: str) -> str:
    """Return the hub name of a draft. Facts of an earlier revision have a name of ours, with an @
    behind it."""
    return draft.partition("@")[0] if draft in shipped("draft") else draft


def look_up(role: str, name: str, *, offline: bool = False) -> ModelFacts:
    """Facts of the target or draft `name`: a folder, or a name on the hub. If the hub does not
    answer or is not asked (`offline`), a shipped name, in any case, has the shipped facts, and
    another what is in the local cache.

    Raises:
        ConfigError: nothing is known under that name, its files cannot be fetched or read, or it is
            a draft given as target or a target given as draft.
    """
    if exists(name):
        return _of_folder(role, Path(name))
    ours = _shipped_name(role, name)
    if ours is not None:
        return _of_hub_or_shipped(role, shipped(role)[ours], offline)
    if _shipped_name(_OTHER[role], name) is not None:
        raise _swapped(role, name)
    check_path(role, name)
    try:
        config, online = fetch_config(role, name, offline=offline)
    except ConfigError as error:
        required = f"{error.required}; {_suggestion(role, name)}"
        raise ConfigError(error.field, name, required) from error
    return _fetched(role, name, config, online)


def _of_hub_or_shipped(role: str, facts: ModelFacts, offline: bool) -> ModelFacts:
    if offline or repository_of(facts.name) != facts.name:
        return facts
    try:
        config, online = fetch_config(role, facts.name)
    except ConfigError:
        online = False
    if online:
        return _fetched(role, facts.name, config, online)
    return replace(facts, source=f"{facts.source} Shipped here: the hub did not give its config.")


def _fetched(role: str, name: str, config: Path, online: bool) -> ModelFacts:
    """Facts by a config.json in the local cache, and what is on the hub or beside it."""
    raw = read_json_object(config, f"{role} checkpoint")
    if role == "target":
        refuse_draft_as_target(name, raw)
    source = f"config.json of {name} {'on the hub' if online else 'in the local cache'}"
    if not online:
        return _of_files(role, name, raw, config.parent, source)
    weights = hub_tensors(role, name)
    if weights is None:
        if role == "draft":
            required = "no safetensors weights on the hub; a draft is read from safetensors files"
            raise ConfigError("draft", name, required)
        return ModelFacts(name, raw, None, source)
    found_tensors, total = weights
    tensors = {plain_name(stored): tensor for stored, tensor in found_tensors.items()}
    source = f"{source}, and the headers of its weights"
    return ModelFacts(name, raw, total, source, tensors=tensors)


def _shipped_name(role: str, name: str) -> str | None:
    names = {spelling.casefold(): spelling for spelling in shipped(role)}
    return names.get(name.casefold())


def _suggestion(role: str, name: str) -> str:
    """The shipped names that are like `name`, with or without its organization, or all of them. A
    name with something behind it, such as -FP8, is another checkpoint, and no slip."""
    by_model = {each.casefold().rpartition("/")[2]: each for each in shipped(role)}
    model = name.casefold().rpartition("/")[2]
    for base, published in by_model.items():
        if model.startswith(f"{base}-") and model != f"{base}-":
            required = (
                "no facts of it are shipped: give a folder with the "
                f"{role}'s config.json and weights"
            )
            in_8_bits = f", or {published} with --quantization fp8"
            return required + (in_8_bits if model == f"{base}-fp8" else "")
    near = difflib.get_close_matches(model, by_model, cutoff=0.75)
    if near:
        return f"did you mean {' or '.join(repr(by_model[text]) for text in near)}?"
    return f"facts of these {role}s are shipped: {', '.join(by_model.values())}"


def _swapped(role: str, name: str) -> ConfigError:
    other = _OTHER[role]
    return ConfigError(
        role, name, f"this is a {other}: give it as {{{other}}}, and the {role} here"
    )


def refuse_draft_as_target(name: str, raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if the config.json of the target `name` is clearly that of a draft.
    `DraftConfig` refuses the other mistake."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any("dflash" in str(name).casefold() for name in names)
    if named or "dflash_config" in raw:
        raise _swapped("target", name)


def check_target_folder(name: str) -> None:
    """Raise ConfigError unless the target `name` is a folder with another model than a draft, or a
    name on the hub, which is not asked."""
    check_path("target", name)
    config = Path(name) / "config.json"
    if exists(config):
        refuse_draft_as_target(name, read_json_object(config, "target checkpoint"))


def _of_folder(role: str, folder: Path) -> ModelFacts:
    if role == "draft":
        check_files(folder)
    raw = read_json_object(folder / "config.json", f"{role} checkpoint")
    if role == "target":
        refuse_draft_as_target(str(folder), raw)
    source = f"config.json and weight files in {folder}"
    return _of_files(role, str(folder), raw, folder, source)


def _of_files(
    role: str, name: str, raw: Mapping[str, Any], folder: Path, source: str
) -> ModelFacts:
    tensors = stored_tensors(folder) if role == "draft" and has_weights(folder) else None
    return ModelFacts(
        name=name,
        config=with_quantization(raw, folder, role),
        weight_bytes=local_weight_bytes(role, folder),
        source=source,
        tensors=tensors,
        weights=None if tensors is None else folder,
    )
