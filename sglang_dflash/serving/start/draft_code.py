"""No Python of a draft's folder is ever run, whatever --trust-remote-code says of the target.

SGLang and Transformers run what `auto_map` of a checkpoint's config.json names: `AutoConfig` when
the config is read and remote code is trusted, everything when SGLang has no class for the model, or
is told not to use it. Published drafts name an `AutoModel`, which SGLang ignores because it has a
class of its own. A draft whose code would run is refused before its config is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.facts.errors import ConfigError, shown
from sglang_dflash.facts.fields import read_json_object


def refuse_code(folder: str, settings: Any) -> None:
    """Raise ConfigError if SGLang would run a file of the draft's folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():  # `DraftConfig` has the message, or SGLang's worker has another format.
        return
    raw = read_json_object(path, "draft checkpoint")
    auto_map = raw.get("auto_map")
    if not isinstance(auto_map, Mapping) or not auto_map:
        return
    would_run = None
    if "AutoConfig" in auto_map and settings.trust_remote_code:
        would_run = "--trust-remote-code would run its AutoConfig"
    elif settings.model_impl == "transformers":
        would_run = "--model-impl transformers would run it"
    elif not _has_class(raw.get("architectures")):
        would_run = f"SGLang has no class for {shown(raw.get('architectures'))} and would run it"
    if would_run is not None:
        raise ConfigError(
            "auto_map",
            dict(auto_map),
            f"{would_run}; code of a draft is never run: remove the entry from {str(path)!r}",
        )


def _has_class(architectures: Any) -> bool:
    """Whether SGLang serves one of the architectures with a class of its own."""
    if architectures == ["DFlashDraftModel"]:
        return True
    if not isinstance(architectures, list):
        return False
    from sglang.srt.models.registry import ModelRegistry  # Imports every model.

    names = [name for name in architectures if isinstance(name, str)]
    return any(ModelRegistry.is_arch_supported(name) for name in names)
