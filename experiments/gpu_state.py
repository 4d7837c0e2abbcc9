"""Finished parts of an experiment in a file, so that a run that was cut off can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sglang_dflash.facts.errors import ConfigError


class State:
    """Results of parts by name, for one set-up.

    Args:
        path: the file; it is made with the first result.
        setup: what the results depend on, such as the device and the options.

    Raises:
        ConfigError: the file has results of another set-up, or is none of ours.
    """

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self._path, self._setup = path, setup
        self.parts: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        try:
            kept = json.loads(path.read_text())
            theirs, self.parts = kept["setup"], dict(kept["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--state: {path} is not a state of this experiment") from error
        # Through JSON, as theirs.
        ours = json.loads(json.dumps(setup))
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"--state: {path} is of a run with {key} {theirs.get(key)!r}, this one has "
                    f"{ours.get(key)!r}; remove the file, or name another"
                )

    def keep(self, name: str, result: dict[str, Any]) -> None:
        """Add a result; the file is whole at any moment."""
        self.parts[name] = result
        whole = json.dumps({"setup": self._setup, "parts": self.parts}, indent=1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(whole + "\n")
        os.replace(beside, self._path)
