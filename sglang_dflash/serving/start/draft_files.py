"""The files of a draft as SGLang reads them: no Python of a draft is ever run, whatever
--trust-remote-code says of the target, and what SGLang cannot read is refused before a model loads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from transformers import AutoConfig

from sglang_dflash.checkpoint.draft_keys import auto_maps, check_code, flat
from sglang_dflash.checkpoint.fields import read_json_object
from sglang_dflash.checkpoint.hub import cached_config, checkpoint_id, draft_folder
from sglang_dflash.common.errors import ConfigError, cut, shown

# The `checkpoint_id` of this server's draft. An environment variable, as the scheduler's processes
# read the draft's config before they have our settings.
DRAFT = "SGLANG_DFLASH_UNTRUSTED_DRAFT"
# SGLang's variable that lets --context-length be more than a model's config says.
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def distrust(draft: str | None) -> None:
    """From now on, in this process and its children, that draft's config is read without code,
    whether SGLang reads it by its name, its folder or another path to it."""
    if draft is None or "\0" in draft:  # No path, and refused as such.
        os.environ.pop(DRAFT, None)
    else:
        os.environ[DRAFT] = checkpoint_id(draft)


def dummy_weights(settings: Any) -> bool:
    """Return whether --load-format, or that of the draft, asks for random weights: no file is
    read."""
    return (settings.speculative_draft_load_format or settings.load_format) == "dummy"


def local_folder(settings: Any, weights: bool = True) -> str:
    """The local folder of the draft checkpoint. Raises ConfigError."""
    return draft_folder(
        settings.speculative_draft_model_path,
        revision=settings.speculative_draft_model_revision,
        weights=weights and not dummy_weights(settings),
        download_dir=settings.download_dir,
    )


def get_config(original: Any, model: Any, *args: Any, **named: Any) -> Any:
    """Around SGLang's `get_config`: a draft's is a config.json, and no code is trusted.

    Without this, SGLang reads params.json of a folder whose name holds that of some Mistral models,
    and if a config.json cannot be read, the model that a head.pt names, both with trust. And it
    does not know the layout that the speculators library writes.
    """
    if checkpoint_id(str(model)) != os.environ.get(DRAFT):
        return original(model, *args, **named)
    names = ("trust_remote_code", "revision", "model_override_args", "model_config_parser")
    named = {**dict(zip(names, args, strict=False)), **named}
    file = cached_config(str(model), named.get("revision"))
    raw = {} if file is None else read_json_object(file, "draft checkpoint")
    if (flat_config := flat(raw)) is not raw:
        # SGLang has its class for these layers under that name.
        return AutoConfig.for_model(**{**flat_config, "architectures": ["DFlashDraftModel"]})
    return original(model, **{**named, "trust_remote_code": False, "model_config_parser": "hf"})


def refuse_code(folder: str) -> None:
    """Raise ConfigError if the draft's config.json names code for more than a model, or if SGLang
    would run a model's code: that of its config is not trusted (`get_config`).

    SGLang and Transformers run the model that `auto_map` of a config.json names if SGLang has no
    class for it. Published drafts name an `AutoModel`, which SGLang ignores because it has a class
    of its own. (With --model-impl transformers it would follow it; DFLASH refuses that flag.)
    """
    path = Path(folder) / "config.json"
    if not path.is_file():  # `DraftConfig` has the message, or SGLang's worker has another format.
        return
    raw = read_json_object(path, "draft checkpoint")
    check_code(raw)
    auto_map, names = next(auto_maps(raw), {}), raw.get("architectures")
    if not auto_map or _has_class(names):
        return
    raise ConfigError(
        "auto_map",
        dict(auto_map),
        f"SGLang has no class for {shown(names)} and would run it; code of a draft is never run: "
        f"remove the entry from {cut(str(path))!r}",
    )


def _has_class(architectures: Any) -> bool:
    """Return whether SGLang serves one of the architectures with a class of its own."""
    if architectures == ["DFlashDraftModel"]:
        return True
    if not isinstance(architectures, list):
        return False
    from sglang.srt.models.registry import ModelRegistry  # Imports every model.

    names = [name for name in architectures if isinstance(name, str)]
    return any(ModelRegistry.is_arch_supported(name) for name in names)


def check_as_sglang_reads_it(folder: str, server_args: Any) -> None:
    """Raise ConfigError if SGLang, which reads the draft's files too, cannot: Transformers must
    know its model_type, and both check fields that we do not read."""
    path = Path(folder) / "config.json"
    raw = read_json_object(path, "draft checkpoint")
    if (Path(folder) / "head.pt").exists() and (Path(folder) / "adapter_config.json").exists():
        required = "head.pt and adapter_config.json, by which SGLang loads another model in place"
        raise ConfigError("draft checkpoint", folder, f"{required} of a draft, are not served")
    error = _error_of_sglang(folder, server_args)
    if error is None:
        return
    if LONGER_CONTEXT in str(error):
        required = (
            "SGLang refuses more than the draft's max_position_embeddings; leave it out, and the "
            f"length of the target's config is served, or set {LONGER_CONTEXT}=1"
        )
        raise ConfigError("--context-length", server_args.context_length, required) from error
    message = cut(str(error)) or type(error).__name__
    fields = [name for name, value in raw.items() if name in message or f"`{value}`" in message]
    named = fields[0] if fields else _wrong_field(raw)
    field = "draft checkpoint" if named is None else f"{named} in the draft's config.json"
    value = folder if named is None else raw[named]
    raise ConfigError(field, value, f"SGLang or Transformers cannot read it ({message})") from error


def _error_of_sglang(folder: str, server_args: Any) -> Exception | None:
    try:
        model = ModelConfig.from_server_args(server_args, model_path=folder, is_draft_model=True)
        parse_dflash_draft_config(draft_hf_config=model.hf_config).require_num_layers()
    # Of many types, from SGLang and Transformers.
    except Exception as error:
        return error
    return None


def _wrong_field(raw: Mapping[str, Any]) -> str | None:
    """The field without which Transformers can read the config; None if there is not one."""

    def is_read_without(name: str) -> bool:
        other_fields = {other: value for other, value in flat(raw).items() if other != name}
        try:
            AutoConfig.for_model(**other_fields)
        except Exception:  # Of many types.
            return False
        return True

    if is_read_without(""):
        return None
    return next((name for name in raw if is_read_without(name)), None)


def check_of_a_server(folder: str, target: str) -> None:
    """`refuse_code` and `check_as_sglang_reads_it` for a server with no other flags."""
    quiet = logging.root.manager.disable
    logging.disable(logging.WARNING)
    server_args = ServerArgs(model_path=target)
    try:
        refuse_code(folder)
        check_as_sglang_reads_it(folder, server_args)
    finally:
        logging.disable(quiet)
