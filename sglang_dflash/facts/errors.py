"""The errors of bad input."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Of an error about something that is missing as a whole.
_NO_VALUE = object()
# A longer value is cut in messages.
_LONGEST = 160


class ConfigError(ValueError):
    """No worker can serve this value.

    Attributes:
        field: the setting, or the field of a file, as the code calls it.
        value: what it holds; `None` is a value too.
        required: what is wrong, and what would be right. Other settings stand in it in braces.
    """

    def __init__(self, field: str, value: object = _NO_VALUE, required: str = "") -> None:
        self.field, self.value, self.required = field, value, required
        super().__init__(self.in_words({}))

    def in_words(self, names: Mapping[str, str]) -> str:
        """The message, in one line, with what the user typed for each setting.

        Args:
            names: setting -> the flag or argument that set it.
        """
        value = "" if self.value is _NO_VALUE else f" {shown(self.value)}"
        field = names.get(self.field, self.field)
        if not self.required:
            return f"{field}{value}"
        required = re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[1]), self.required)
        return f"{field}:{value and value + ';'} {required}"


class UnsupportedDraft(ConfigError):
    """A valid draft or server setting that is not implemented here. SGLang's built-in worker may
    serve it."""


def shown(value: object) -> str:
    """A value as messages give it: its `repr` on one line, cut if it is long."""
    try:
        return cut(repr(value))
    # Nested too deeply; an integer of more digits than Python converts.
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that is too large to be shown"


def cut(text: str) -> str:
    """The first line of `text`, its middle left out if it is long."""
    line = text.strip().split("\n")[0]
    if len(line) <= _LONGEST:
        return line
    return f"{line[:100]}...{line[-40:]} ({len(line)} characters)"
