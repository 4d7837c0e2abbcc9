"""Files of a checkpoint on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_dflash.checkpoint.errors import ConfigError


def draft_folder(flag: str, name: str, *, revision: str | None = None, weights: bool = True) -> str:
    """The local folder of a draft, fetched from the hub if `name` is no path.

    Args:
        flag: what messages call the draft.
        weights: whether to fetch the weights too; without them only JSON files are fetched.

    Raises:
        ConfigError: `name` is neither a path nor a draft that can be fetched.
    """
    if Path(name).exists():
        return name
    patterns = ["*.json", "*.safetensors"] if weights else ["*.json"]
    with _hub_errors(
        f"{flag}: {name!r} is neither a folder here nor a draft that could be fetched from the hub"
    ):
        from huggingface_hub import snapshot_download

        return snapshot_download(name, revision=revision, allow_patterns=patterns)


def fetch_config(kind: str, name: str) -> Path:
    """The config.json of the target or draft `name`, fetched from the hub.

    Raises:
        ConfigError: the hub does not give it; `kind` in capitals is what the message calls it.
    """
    with _hub_errors(
        f"{kind.upper()}: {name!r} is neither a folder here nor a model whose config.json could be "
        "fetched from the hub"
    ):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json"))


@contextmanager
def _hub_errors(message: str) -> Iterator[None]:
    """Raise the hub's errors as a ConfigError: `message`, then the first line of the error."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(f"{message} ({first_line})") from error
