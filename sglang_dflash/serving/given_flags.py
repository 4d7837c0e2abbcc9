"""Values of our flags, which SGLang's arguments take along to every process."""

from __future__ import annotations

from typing import Any

# SGLang keeps underscore attributes of its arguments apart from its fields, and pickles them.
ATTRIBUTE = "_sglang_dflash"
REQUEST_GUARD = "speculative_dflash_request_guard"


def given(server_args: Any) -> dict[str, Any]:
    """The flags that were given, by the names of their fields; empty if none was."""
    return getattr(server_args, ATTRIBUTE, {})


def guard_off(server_args: Any) -> bool:
    """Return whether --speculative-dflash-request-guard is off."""
    return given(server_args).get(REQUEST_GUARD) == "off"
