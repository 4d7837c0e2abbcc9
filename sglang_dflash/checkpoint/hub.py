"""Draft checkpoints by folder or by hub name."""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.checkpoint.errors import ConfigError


def draft_folder(flag: str, name: str, *, revision: str | None = None, weights: bool = True) -> str:
    """The local folder of a draft, fetched from the hub if it is no path; without `weights` its JSON files are enough.

    Raises:
        ConfigError: neither is there; `flag` is what the message calls it.
    """
    if Path(name).exists():
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors"] if weights else ["*.json"]
    try:
        return snapshot_download(name, revision=revision, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{flag}: {name!r} is neither a folder here nor a draft that could be fetched from the hub ({first_line})"
        ) from error
