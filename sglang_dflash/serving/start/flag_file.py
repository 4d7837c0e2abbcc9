"""A server's flags in a YAML file, `--config FILE`, as SGLang's `ConfigArgumentMerger` reads them.
That one's package imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sglang_dflash.common.errors import ConfigError, cut

FLAG = "--config"


def with_file(words: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a command line with the flags of its file, if it names one, in front of those that are
    typed: of two values the later one counts.

    Args:
        words: without the program.
        rows: of `server_flags.json`.

    Raises:
        ConfigError: a server would refuse the file.
    """
    if FLAG not in words:
        return list(words)
    at = words.index(FLAG)
    before, after = words[:at], words[at + 1 :]
    if not after or FLAG in after:
        required = "no file is named" if not after else "two files are named, one can be read"
        raise ConfigError(FLAG, required=required)
    path, rows = after[0], list(rows)
    switches = set[str]().union(*(_keys(row) for row in rows if row.get("takes") == "switch"))
    only_typed = set[str]().union(*(_keys(row) for row in rows if row.get("in_file") is False))
    flags = list[str]()
    for key, value in _read(path).items():
        if not isinstance(key, str):
            raise ConfigError(FLAG, path, f"{cut(str(key))}: this is no flag")
        name = key.replace("-", "_")
        if name in only_typed:
            raise ConfigError(FLAG, path, f"{key}: cannot be given in a file; type the flag")
        try:
            flags += _typed(f"--{key}", value, name in switches)
        except (TypeError, ValueError):
            raise ConfigError(FLAG, path, f"{key}: its value cannot be written as JSON") from None
    return [*flags, *before, *after[1:]]


def _keys(row: Mapping[str, Any]) -> Iterator[str]:
    """Return the keys by which a file may name a setting."""
    yield row["name"]
    for flag in row["flags"]:
        if flag.startswith("--"):
            yield flag[2:].replace("-", "_")


def _read(path: str) -> dict[Any, Any]:
    """Return a file's keys and values. Raises ConfigError."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(FLAG, path, "a file that ends with .yaml or .yml is required")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(FLAG, path, f"cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(FLAG, path, f"this is not YAML: {cut(reason)}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(FLAG, path, "lines of the form `flag: value` are required")
    return content or {}


def _typed(flag: str, value: Any, is_switch: bool) -> list[str]:
    """A flag of a file as a command line gives it."""
    if isinstance(value, bool):
        return [flag] * value if is_switch else [flag, str(value).lower()]
    if isinstance(value, list):
        return [flag, *map(str, value)] if value else []
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
