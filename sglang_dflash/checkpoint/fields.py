"""Typed fields of a config.json. Every value that is missing or invalid raises the same error:

FIELD: VALUE in the draft's config.json; a positive integer is required
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_dflash.checkpoint.errors import ConfigError


@dataclass(frozen=True)
class Fields:
    """The fields of one model. A field that is null counts as missing.

    Attributes:
        values: field name to value.
        paths: field name to its dotted path in the file, for fields below the top level.
        prefix: dotted path of the object that the other fields belong to, with a trailing dot.
        file: how messages name the file.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, str]
    prefix: str
    file: str

    @classmethod
    def of(
        cls,
        raw: Mapping[str, Any],
        model: Literal["target", "draft"],
        *,
        sections: tuple[str, ...] = ("text_config",),
    ) -> Fields:
        """Merge a parsed config.json with its `sections`, objects whose fields override it.

        Raises:
            ConfigError: a section is not an object.
        """
        top = cls(raw, {}, "", f"the {model}'s config.json")
        values, paths = dict(raw), dict(top.paths)
        for section in sections:
            inner = top.block(section)
            values |= inner.values
            paths |= {name: inner.path(name) for name in inner.values}
        return cls(values, paths, "", top.file)

    def block(self, name: str) -> Fields:
        """The fields of the object `name`, none if it is missing. Raises ConfigError."""
        value = self.get(name)
        if not isinstance(value, Mapping | None):
            raise self.error(name, "an object")
        return Fields(value or {}, {}, f"{self.path(name)}.", self.file)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is; `default` if it is missing."""
        value = self.values.get(name)
        return default if value is None else value

    def path(self, name: str) -> str:
        """The dotted path of a field, as messages give it."""
        return self.paths.get(name, f"{self.prefix}{name}")

    def error(self, name: str, required: str) -> ConfigError:
        """The error for a field whose value is not `required`, such as "a positive integer"."""
        value = self.get(name)
        found = "missing from" if value is None else f"{value!r} in"
        return ConfigError(f"{self.path(name)}: {found} {self.file}; {required} is required")

    def positive_int(self, name: str, default: int | None = None) -> int:
        """An integer above 0. Raises ConfigError, also if there is no value and no default."""
        value = self.get(name, default)
        if not _is_int(value) or value < 1:
            raise self.error(name, "a positive integer")
        return value

    def token_id(self, name: str) -> int:
        """An integer of at least 0. Raises ConfigError."""
        value = self.get(name)
        if not _is_int(value) or value < 0:
            raise self.error(name, "a token id (an integer of at least 0)")
        return value

    def positive_number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. Raises ConfigError, also if there is no value and no default."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.error(name, "a positive number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises ConfigError."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def layer_ids(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A non-empty list of layer ids from 0 to `num_layers - 1`. Raises ConfigError."""
        ids = self.get(name)
        if not isinstance(ids, list | tuple) or not ids or not all(map(_is_int, ids)):
            raise self.error(name, "a non-empty list of layer ids")
        outside = [i for i in ids if not 0 <= i < num_layers]
        if outside:
            raise ConfigError(
                f"{self.path(name)}: {outside} outside the target's layers 0 to {num_layers - 1}"
            )
        return tuple(ids)

    def layer_types(self, num_layers: int) -> tuple[str, ...] | None:
        """The field `layer_types`, one name per layer, or None. Raises ConfigError."""
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
            raise self.error("layer_types", "a list of names")
        if len(types) != num_layers:
            raise ConfigError(
                f"{self.path('layer_types')}: {len(types)} entries for {num_layers} layers; "
                "one per layer is required"
            )
        return tuple(types)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_json_object(path: Path, what: str) -> Mapping[str, Any]:
    """Parse a JSON file that holds an object. `what` begins every message.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else.
    """
    if not path.is_file():
        raise ConfigError(
            f"{what}: no {path.name} in {str(path.parent)!r}; give the folder of a checkpoint"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {str(path)!r} is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{what}: {str(path)!r} holds no JSON object")
    return raw
