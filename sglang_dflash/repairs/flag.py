"""The flag of the request guard. `serving.start.flags` keeps its value with SGLang's arguments."""

from __future__ import annotations

from typing import Any

# SGLang keeps underscore attributes of its arguments apart from its fields, and pickles them.
ATTRIBUTE = "_sglang_dflash"
FIELD = "speculative_dflash_request_guard"


def guard_off(server_args: Any) -> bool:
    """Whether --speculative-dflash-request-guard is off."""
    return getattr(server_args, ATTRIBUTE, {}).get(FIELD) == "off"
