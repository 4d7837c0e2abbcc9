"""Files of results: checked before a run of hours, and written whole."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_dflash.common.errors import ConfigError, cut


def make_folder(field: str, folder: Path) -> Path:
    """Make a folder for results if it does not exist. Raises ConfigError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        required = f"a folder that can be made is required ({cut(str(error))})"
        raise ConfigError(field, str(folder), required) from error
    return folder


def check_writable(field: str, file: Path) -> None:
    """Raise ConfigError if a result cannot be written to `file`. What it holds stays as it is, and
    its folder is made."""
    make_folder(field, file.parent)
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        required = f"it cannot be written ({cut(str(error))})"
        raise ConfigError(field, str(file), required) from error


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step, as UTF-8: two runs, or an interruption, leave no mixture."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
