"""Redaction of the server's keys and passwords, which SGLang shows with its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Fields to redact where SGLang shows its arguments: SGLang's own list, and the server's secrets.
_OF_SERVER = ("api_key", "admin_api_key", "ssl_keyfile_password")
FIELDS = frozenset({"watermark_key", "watermark_key_b", "watermark_config", *_OF_SERVER})
_FLAGS = tuple(f"--{name.replace('_', '-')}" for name in _OF_SERVER)
_REDACTED = "<redacted>"


def hide_in_command(original: Any, argv: Sequence[str], *args: Any, **named: Any) -> str:
    """Around `redact_watermark_command_line`, whose result `/server_info` shows: redact secrets."""
    hidden, is_value = [], False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if is_value:
            hidden.append(_REDACTED)
            is_value = False
        # argparse accepts a prefix of a flag if it is unambiguous.
        elif len(flag) >= 4 and any(secret_flag.startswith(flag) for secret_flag in _FLAGS):
            hidden.append(f"{flag}={_REDACTED}" if equals else flag)
            is_value = not equals
        else:
            hidden.append(argument)
    return str(original(hidden, *args, **named))
