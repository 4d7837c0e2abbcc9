"""The errors that a command tells in a line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

# The value of an error about something that is missing as a whole. It is the same object in every
# process, and processes send errors to each other.
_NO_VALUE = ...


class ConfigError(ValueError):
    """No worker can serve this value.

    Attributes:
        field: the setting, or the field of a file, as the code calls it.
        value: what it holds; `None` is a value too.
        required: what is wrong, and what would be right. Other settings stand in it in braces.
    """

    def __init__(self, field: str, value: object = _NO_VALUE, required: str = "") -> None:
        self.field, self.value, self.required = field, value, required
        text = "" if value is _NO_VALUE else f" {shown(value)}"
        if required:
            text = f":{text and text + ';'} {_filled(required, {})}"
        super().__init__(f"{field}{text}")

    def named(self, names: Mapping[str, str]) -> Self:
        """The same error with what the user typed for each setting.

        Args:
            names: setting -> the flag or argument that sets it.
        """
        field = names.get(self.field, self.field)
        return type(self)(field, self.value, _filled(self.required, names))


class UnsupportedDraft(ConfigError):
    """A valid draft or server setting that is not implemented here. SGLang's built-in worker may
    serve it."""


class Failed(Exception):
    """A valid request could not be carried out. The message gives the reason."""


def _filled(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[1]), text)


def shown(value: object) -> str:
    """A value as messages give it: its `repr` on one line, cut if it is long."""
    try:
        return cut(repr(value))
    # Nested too deeply; an integer of more digits than Python converts.
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that is too large to be shown"


def shown_pair(draft: object, target: object) -> str:
    """Return the suffix of a message that names its draft and target."""
    return f" (draft {shown(draft)}, target {shown(target)})"


def innermost(error: BaseException) -> str:
    """The reason behind an error of a client, which wraps the system's several times."""
    wrapped = [error]
    while (inner := wrapped[-1].__context__ or wrapped[-1].__cause__) is not None:
        wrapped.append(inner)
    by_proxy = any(type(each).__name__ == "ProxyError" for each in wrapped)
    reason = str(wrapped[-1]) or type(wrapped[-1]).__name__
    return cut(f"the proxy of the environment: {reason}" if by_proxy else reason)


def cut(text: str) -> str:
    """The first line of `text`, its middle left out if it is long."""
    line = text.strip().split("\n")[0]
    if len(line) <= 160:
        return line
    return f"{line[:100]}...{line[-40:]} ({len(line)} characters)"
