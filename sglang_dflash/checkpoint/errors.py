"""The errors of bad input."""

from __future__ import annotations


class ConfigError(ValueError):
    """No worker can serve this value. The message gives the field, its value and what is valid."""


class UnsupportedDraft(ConfigError):
    """A valid draft or server setting that is not implemented here. SGLang's built-in worker may
    serve it."""
