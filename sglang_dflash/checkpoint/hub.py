"""Files of a checkpoint on the hub."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import exists
from pathlib import Path

from sglang_dflash.checkpoint.fields import check_files
from sglang_dflash.checkpoint.stored import StoredTensor
from sglang_dflash.checkpoint.tensors import MASK_EMBEDDING
from sglang_dflash.common.errors import ConfigError, cut


def check_path(field: str, name: str) -> None:
    """Raise ConfigError for what can only be meant as a folder, and is none.

    Args:
        field: what errors call the model.
    """
    is_path = name.startswith((".", "/", "~")) or name.rstrip("/").count("/") > 1
    if not is_path or "://" in name or exists(name):
        return
    near = _near_folder(name)
    suggestion = f"; did you mean {near!r}?" if near else ""
    raise ConfigError(field, name, f"there is no such folder here{suggestion}")


def _near_folder(name: str) -> str | None:
    path = Path(name)
    try:
        beside = [str(other) for other in path.parent.iterdir() if other.is_dir()]
    except (OSError, ValueError):
        return None
    return next(iter(difflib.get_close_matches(str(path), beside, 1, cutoff=0.8)), None)


def draft_folder(
    name: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    download_dir: str | None = None,
) -> str:
    """The local folder of a draft, fetched from the hub if `name` is no path.

    Args:
        weights: whether to fetch the weights too; without them only JSON files are fetched.
        download_dir: where to; None for the hub's cache. SGLang's --download-dir.

    Raises:
        ConfigError: `name` is neither a path nor a draft that can be fetched.
    """
    if exists(name):
        check_files(name)
        return name
    check_path("draft", name)
    # A mask embedding is fetched to be refused by name: it is never read.
    patterns = ["*.json", "*.safetensors", MASK_EMBEDDING] if weights else ["*.json"]
    required = "it is neither a folder here nor a draft that could be fetched from the hub"
    with _hub_errors("draft", name, required):
        from huggingface_hub import snapshot_download

        if download_dir is not None:
            # SGLang, as Transformers, looks for a config.json there and nowhere else.
            snapshot_download(name, revision=revision, allow_patterns=["*.json"])
        return snapshot_download(
            name, revision=revision, allow_patterns=patterns, cache_dir=download_dir
        )


def checkpoint_id(model: str) -> str:
    """Return what tells a checkpoint from others, the same for all spellings of its hub name or
    path: of the hub the repository, whatever the revision, also by a path into a cache; else the
    real path."""
    if not exists(model):
        return f"models--{model.replace('/', '--')}"
    path = Path(model).resolve()
    # CACHE/models--OWNER--NAME/snapshots/COMMIT
    is_cached = path.parent.name == "snapshots" and path.parents[1].name.startswith("models--")
    return path.parents[1].name if is_cached else str(path)


def cached_config(name: str, revision: str | None = None) -> Path | None:
    """The config.json of a folder, or of a name of the hub that was fetched before; or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    file = Path(name) / "config.json"
    if not exists(name):
        try:
            cached = try_to_load_from_cache(name, file.name, revision=revision)
        except HFValidationError:  # No name of the hub.
            return None
        # Neither None nor a path: the cache notes that the repository has no such file.
        file = Path(cached if isinstance(cached, str) else "")
    return file if file.is_file() else None


def fetch_config(role: str, name: str, *, offline: bool = False) -> tuple[Path, bool]:
    """The config.json of the target or draft `name` in the local cache, and whether the hub
    answered. If not, it is what an earlier download left, with its other files beside it.

    The hub is asked once: without a network this does not wait for retries.

    Args:
        offline: do not ask the hub.

    Raises:
        ConfigError: neither has it.
    """
    import httpx

    source = "is in the local cache" if offline else "could be fetched from the hub"
    required = f"it is neither a folder here nor a model whose config.json {source}"
    with _hub_errors(role, name, required):
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        reason = "--offline: the hub is not asked"
        if not offline:
            try:
                # 5 s for the answer to begin: `hf_hub_download` would retry a connection that fails
                # for half a minute.
                get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5.0)
                return Path(hf_hub_download(name, "config.json")), True
            except (httpx.TransportError, OfflineModeIsEnabled) as error:
                reason = f"the hub cannot be reached: {error}, and it is not in the local cache"
        try:
            return Path(hf_hub_download(name, "config.json", local_files_only=True)), False
        except LocalEntryNotFoundError as error:
            raise OSError(reason) from error


def unreachable(dataset: str) -> str | None:
    """Return why the hub cannot be asked for a data set; None if it answers. The hub is asked
    once."""
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(dataset, "README.md", repo_type="dataset"), timeout=5.0)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except httpx.TransportError as error:
        return f"the hub cannot be reached: {error}"
    except HfHubHTTPError:
        pass
    return None


def hub_tensors(role: str, name: str) -> tuple[dict[str, StoredTensor], int] | None:
    """Tensors by stored name, and bytes, of the safetensors weights of `name` on the hub, from
    their headers. None if its weights have another format.

    Raises:
        ConfigError: the hub does not give them, or a header is damaged.
    """
    import httpx

    with _hub_errors(role, name, "its safetensors headers are needed from the hub"):
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        try:
            files = get_safetensors_metadata(name).files_metadata.values()
        except NotASafetensorsRepoError:
            return None
        except (httpx.TransportError, SafetensorsParsingError) as error:
            raise OSError(str(error)) from error
    tensors = [item for file in files for item in file.tensors.items()]
    total = sum(info.data_offsets[1] - info.data_offsets[0] for _, info in tensors)
    return {stored: StoredTensor(info.dtype, tuple(info.shape)) for stored, info in tensors}, total


@contextmanager
def _hub_errors(field: str, name: str, required: str) -> Iterator[None]:
    """Raise the hub's errors as a ConfigError, which ends with the first line of the error."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(field, name, f"{required} ({cut(str(error))})") from error
