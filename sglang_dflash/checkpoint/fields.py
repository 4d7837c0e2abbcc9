"""Typed fields of a config.json. Every value that is missing or invalid raises the same error:

FIELD in the draft's config.json: VALUE; a positive integer is required
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

from sglang_dflash.common.errors import ConfigError, UnsupportedDraft, cut, shown

# Counts and sizes of a model are 32-bit in SGLang and in kernels.
_MOST_INT = 2**31 - 1
# The largest width of a layer, far above that of any published draft: the arithmetic of sizes does
# not overflow.
MOST_WIDTH = 2**18
# Files beside config.json and weights that SGLang reads of a draft.
READ_BY_SGLANG = (
    "adapter_config.json", "generation_config.json", "head.pt", "hf_quant_config.json",
)  # fmt: skip
# Values of a field that are as good as none.
NEUTRAL = (None, False, 0, "")
# The largest config.json; published ones are below 100 kB.
_MOST_BYTES = 2**20


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
        section: str | None = "text_config",
    ) -> Fields:
        """Merge a parsed config.json with its `section`, an object whose fields override it.

        Raises:
            ConfigError: the section is not an object.
        """
        top = cls(raw, {}, "", f"the {model}'s config.json")
        if section is None:
            return top
        inner = top.block(section)
        overrides = {name: value for name, value in inner.values.items() if name in inner}
        return cls(
            {**raw, **overrides}, {name: inner.path(name) for name in overrides}, "", top.file
        )

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
        if name not in self:
            return ConfigError(self.named(name), required=f"missing; {required} is required")
        return ConfigError(self.named(name), self.get(name), f"{required} is required")

    def unsupported(self, name: str, required: str) -> UnsupportedDraft:
        """The error for a valid value that is not implemented here."""
        return UnsupportedDraft(self.named(name), self.get(name), required)

    def named(self, name: str) -> str:
        """Return a field's name in errors: its path and the file."""
        return f"{self.path(name)} in {self.file}"

    def positive_int(self, name: str, default: int | None = None, *, most: int = _MOST_INT) -> int:
        """An integer from 1 to `most`. Raises ConfigError, also if there is no value and no
        default."""
        value = self.get(name, default)
        if not is_int(value) or value < 1:
            raise self.error(name, "a positive integer")
        if value > most:
            raise self.error(name, f"an integer from 1 to {most}")
        return value

    def integer(self, name: str, default: int) -> int:
        """An integer of any sign. Raises ConfigError."""
        value = self.get(name, default)
        if not is_int(value):
            raise self.error(name, "an integer")
        return value

    def token_id(self, name: str) -> int:
        """An integer of at least 0. Raises ConfigError."""
        value = self.get(name)
        if not is_int(value) or value < 0:
            raise self.error(name, "a token id (an integer of at least 0)")
        return value

    def positive_number(
        self, name: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf
    ) -> float:
        """A finite number above 0, from `least` to `most`. Raises ConfigError, also if there is no
        value and no default."""
        value = self.get(name, default)
        try:
            number = float(value) if is_int(value) or isinstance(value, float) else math.nan
        except OverflowError:
            number = math.inf
        if not 0 < number < math.inf:
            raise self.error(name, "a positive number")
        if not least <= number <= most:
            raise self.error(name, f"a number from {least:g} to {most:g}")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises ConfigError."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def layer_ids(self, name: str, num_layers: int | None) -> tuple[int, ...]:
        """A non-empty list of layer ids from 0 to `num_layers - 1` if that is known, each above the
        one before: a target gives the outputs of its layers in their order. Raises ConfigError."""
        ids = self.get(name)
        if not isinstance(ids, list | tuple) or not ids or not all(map(is_int, ids)):
            raise self.error(name, "a non-empty list of layer ids")
        if not all(0 <= i < (num_layers or _MOST_INT) for i in ids):
            last = "the last" if num_layers is None else num_layers - 1
            raise self.error(name, f"a list of the target's layers, 0 to {last},")
        if list(ids) != sorted(set(ids)):
            raise self.error(name, "a list of distinct layer ids in ascending order")
        return tuple(ids)

    def word(self, name: str) -> str | None:
        """The name of a kind, such as "yarn"; None if it is missing. Raises ConfigError."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "a name")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """A list of names, empty if it is missing. Raises ConfigError."""
        value = self.get(name, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of names")
        return tuple(value)

    def layer_types(self, num_layers: int) -> tuple[str, ...] | None:
        """The field `layer_types`, one name per layer, or None. Raises ConfigError."""
        if "layer_types" not in self:
            return None
        types = self.words("layer_types")
        if len(types) != num_layers:
            raise self.error("layer_types", f"one name for each of {num_layers} layers")
        return types


def is_int(value: object) -> bool:
    """Return whether a value is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_json_object(path: Path, field: str) -> Mapping[str, Any]:
    """Parse a JSON file that holds an object. `field` begins every message.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else.
    """
    if not isfile(path):
        folder = str(path.parent)
        raise ConfigError(field, folder, f"no {path.name} in it; give the folder of a checkpoint")
    if path.name == "config.json" and path.stat().st_size > _MOST_BYTES:
        raise ConfigError(field, str(path), f"more than {_MOST_BYTES} bytes; no config is so large")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    # It cannot be read, or is nested too deeply, not JSON, not UTF-8, or has an integer of
    # thousands of digits.
    except (OSError, RecursionError, ValueError) as error:
        required = f"cannot be read as JSON ({cut(str(error))})"
        raise ConfigError(field, str(path), required) from error
    if not isinstance(raw, dict):
        required = f"an object of fields is required, it holds {shown(raw)}"
        raise ConfigError(field, str(path), required)
    return raw


def check_files(folder: str | Path) -> None:
    """Raise ConfigError if something in a draft's folder is neither file nor folder: SGLang reads
    files of many names, and would wait for a pipe; or if one that it reads holds no JSON object; or
    if the folder cannot be read."""
    field = "draft checkpoint"
    try:
        for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
            if path.exists() and not (path.is_file() or path.is_dir()):
                required = "a pipe, a socket or a device; a file is required"
                raise ConfigError(field, str(path), required)
            if path.name in READ_BY_SGLANG and path.suffix == ".json":
                read_json_object(path, field)
    except OSError as error:
        required = f"cannot be read: {error.strerror}"
        raise ConfigError(field, str(folder), required) from error
