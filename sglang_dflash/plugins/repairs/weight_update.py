"""A check of `/update_weights_from_disk`: the folder must hold the target's or the draft's weights.

SGLang copies the tensors whose names it knows and reports success, whatever the folder holds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from os.path import exists
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from sglang_dflash.checkpoint.fields import Fields, read_json_object
from sglang_dflash.checkpoint.stored import StoredTensor, stored_tensors
from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.common.log import Log
from sglang_dflash.serving.draft_weights.from_disk import is_for_draft

logger = Log(__name__)

# Formats of --load-format that read safetensors files.
CHECKED_FORMATS = (None, "auto", "safetensors")
# A checkpoint with tied embeddings may leave out one of these.
TIED = ("lm_head.weight", "embed_tokens.weight")
# The number of a layer of the language model, in the names of its tensors.
LAYER = re.compile(r"(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
# The attribute of SGLang's `TokenizerManager` that holds the `ServedCheckpoint`.
SERVED = "sglang_dflash_served"


class ServedCheckpoint(NamedTuple):
    """The facts of the served checkpoint that new weights must share.

    Attributes:
        architectures: of its config.json.
        depth: layers of the language model; None if config.json does not tell.
        tensors: by name; None if they are not stored in safetensors files.
    """

    architectures: Any
    depth: int | None
    tensors: Mapping[str, StoredTensor] | None


async def check_and_update(original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
    """Around `TokenizerManager.update_weights_from_disk`: check the folder first.

    Returns:
        `(success, message, paused requests)`.
    """
    if not await is_for_draft(manager, obj.model_path):
        try:
            check_format(obj.load_format)
            await asyncio.to_thread(check_folder, obj.model_path, manager)
        except ConfigError as error:
            return False, f"{error}. The weights are unchanged", 0
    return await original(manager, obj, request)


def check_format(load_format: str | None) -> None:
    """Raise ConfigError for a format whose weights cannot be compared with the served ones.

    Weights of another model would be reported as a success if their shapes are equal, and would end
    the server otherwise.
    """
    if load_format not in CHECKED_FORMATS:
        formats = ", ".join(repr(name) for name in CHECKED_FORMATS if name)
        required = (
            f"one of {formats} is required; SGLANG_PLUGINS=dflash,dflash_cpu leaves the repairs "
            "out, and with them this check"
        )
        raise ConfigError("load_format", load_format, required)


def check_folder(folder: str, manager: Any) -> None:
    """Compare architecture, tensor names and shapes with those of the served checkpoint.

    If the served model is not stored in safetensors files, tensors are not compared; if its files
    cannot be read from here, nothing is.

    Args:
        folder: or a name on the hub.
        manager: SGLang's `TokenizerManager`.

    Raises:
        ConfigError: the folder does not hold weights of the served model, or cannot be read.
    """
    folder = _local("model_path", folder)
    served = served_checkpoint(manager)
    if served is None:
        return
    new, old = _config(folder).get("architectures"), served.architectures
    if new != old:
        raise ConfigError("model_path", folder, f"it holds {new}; the served model is {old}")
    if served.tensors is not None:
        check_tensors(folder, stored_tensors(folder, "new"), served.tensors, served.depth)


def served_checkpoint(manager: Any) -> ServedCheckpoint | None:
    """The checkpoint that the manager's server has loaded first. It is read once: who trains a
    model may delete the folders of earlier weights. None, with a warning in the log, if that
    fails."""
    if not hasattr(manager, SERVED):
        served = None
        try:
            served = _read_served(manager)
        except ConfigError as error:
            logger.warning("/update_weights_from_disk checks nothing of new weights: %s", error)
        setattr(manager, SERVED, served)
    return getattr(manager, SERVED)


def _read_served(manager: Any) -> ServedCheckpoint:
    """Raises ConfigError."""
    settings = manager.server_args
    # It was loaded from this machine, so nothing needs to be fetched. A model on object storage or
    # ModelScope is not in the hub's cache.
    folder = _local(
        "served model", manager.model_path, local_files_only=True,
        revision=settings.revision, cache_dir=settings.download_dir,
    )  # fmt: skip
    is_stored = any(Path(folder).glob("*.safetensors"))
    tensors = stored_tensors(folder, "served") if is_stored else None
    config = _config(folder)
    depth = Fields.of(config, "target").get("num_hidden_layers")
    return ServedCheckpoint(config.get("architectures"), depth, tensors)


def _local(field: str, name: str, **where: Any) -> str:
    """The local folder of a checkpoint, fetched from the hub if need be. Raises ConfigError.

    Args:
        where: arguments of `snapshot_download`.
    """
    if exists(name):
        return name
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **where)
    except (HFValidationError, HfHubHTTPError, httpx.TransportError, OSError) as error:
        required = (
            f"neither a folder here nor on the hub, so nothing is compared ({cut(str(error))})"
        )
        raise ConfigError(field, name, required) from error


def _config(folder: str) -> Mapping[str, Any]:
    """The folder's config.json. Raises ConfigError."""
    return read_json_object(Path(folder) / "config.json", "new checkpoint")


def check_tensors(
    folder: str,
    new: Mapping[str, StoredTensor],
    old: Mapping[str, StoredTensor],
    depth: int | None,
) -> None:
    """Raise ConfigError unless the tensors of both checkpoints have the same names and shapes, but
    for those that a checkpoint of the model may leave out."""
    for name in sorted({*new, *old}):
        if (name not in new or name not in old) and is_optional(name, depth):
            continue
        if name not in new:
            raise ConfigError("model_path", folder, f"no tensor {name!r} of the served model")
        if name not in old:
            raise ConfigError("model_path", folder, f"tensor {name!r} is not the served model's")
        if new[name].shape != old[name].shape:
            shape, served = list(new[name].shape), list(old[name].shape)
            required = f"{name} is {shape}, the served model's {served}"
            raise ConfigError("model_path", folder, required)


def is_optional(name: str, depth: int | None) -> bool:
    """Return whether a checkpoint of the model may leave a tensor out: one of tied embeddings, or
    of the layers that predict further tokens (MTP), which published checkpoints have, SGLang's
    model does not read, and Transformers does not save."""
    layer = LAYER.match(name)
    is_beyond = layer is not None and depth is not None and int(layer[1]) >= depth
    return name in TIED or "mtp" in name or is_beyond
