"""The errors of bad input."""

from __future__ import annotations

# A longer value is cut in messages.
_LONGEST = 160


class ConfigError(ValueError):
    """No worker can serve this value. The message gives the field, its value and what is valid."""


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
