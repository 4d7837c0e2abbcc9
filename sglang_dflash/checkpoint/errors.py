"""The errors of bad input."""

from __future__ import annotations


class ConfigError(ValueError):
    """A field holds a value that cannot be served by anybody; the message names field, value and what would be right."""


class UnsupportedDraft(ConfigError):
    """A valid draft (or server setting) that this drafter does not implement; SGLang's built-in worker may."""
