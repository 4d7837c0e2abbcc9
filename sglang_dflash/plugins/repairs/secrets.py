"""Keys and passwords of the server, which SGLang shows with its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Names of fields that SGLang redacts where it shows its arguments: its own, and the server's.
_OF_SERVER = ("api_key", "admin_api_key", "ssl_keyfile_password")
FIELDS = frozenset({"watermark_key", "watermark_key_b", "watermark_config", *_OF_SERVER})
_FLAGS = tuple(f"--{name.replace('_', '-')}" for name in _OF_SERVER)
_REDACTED = "<redacted>"


def hide_in_command(original: Any, argv: Sequence[str], *args: Any, **named: Any) -> str:
    """Around `redact_watermark_command_line`, whose result `/server_info` shows."""
    hidden, is_value = [], False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if is_value:
            hidden.append(_REDACTED)
            is_value = False
        # argparse takes a flag's beginning for it, if no other flag begins so.
        elif len(flag) >= 4 and any(one.startswith(flag) for one in _FLAGS):
            hidden.append(f"{flag}={_REDACTED}" if equals else flag)
            is_value = not equals
        else:
            hidden.append(argument)
    return str(original(hidden, *args, **named))
