"""Write the flags of a server to `sglang_dflash/serving/start/server_flags.json`.

    python -m launch.server_flags

Loads SGLang with our plugins.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from sglang_dflash.serving.start.server_flags import FILE, TYPES


def server_parser() -> argparse.ArgumentParser:
    """SGLang's parser with our flags."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return parser


def describe_flags(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The rows of the file (`serving.start.server_flags.rows`)."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    only_typed = ConfigArgumentMerger(parser).unsupported_actions.values()
    return [
        _row(action) | ({"in_file": False} if action in only_typed else {})
        for action in parser._actions
    ]


def _row(action: argparse.Action) -> dict[str, Any]:
    row: dict[str, Any] = {"name": action.dest, "flags": list(action.option_strings)}
    if isinstance(action, argparse.BooleanOptionalAction):
        return row | {"takes": "on or off"}
    if action.nargs == 0:
        return row | {"takes": "switch"}
    if action.nargs is not None:
        row["takes"] = action.nargs
    name = getattr(action.type, "__name__", None)
    if name in TYPES:
        row["type"] = name
    if action.choices is not None:
        # Some choices of SGLang are a set.
        choices = (
            action.choices if isinstance(action.choices, list | tuple) else sorted(action.choices)
        )
        row["choices"] = list(choices)
    return row


def as_text(rows: list[dict[str, Any]]) -> str:
    """The file's content: a line for each row."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(as_text(describe_flags(server_parser())))
