"""A server's command line, read without SGLang: its parser takes half a minute of imports.

`server_flags.json` has the flags of that parser, ours among them. `python -m launch.server_flags`
writes it, and `tests/serving/start/test_server_flags.py` compares both parsers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from sglang_dflash.common.command_line import explained
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.serving.start.flag_file import with_file

FILE = Path(__file__).parent / "server_flags.json"
# The name of a command line in messages.
COMMAND = "launch command"
TARGET_FLAGS = ("--model-path", "--model")
# Settings that we had a flag for -> what a user of it does instead.
REMOVED: Mapping[str, str] = {
    "speculative_dflash_request_guard": (
        "requests are guarded unless SGLANG_PLUGINS=dflash,dflash_cpu in the server's environment "
        "leaves out all repairs"
    ),
}
_THOUSANDS = dict(zip("kMGT", (1000, 1000**2, 1000**3, 1000**4), strict=True))
_OF_1024 = dict(zip(("Ki", "Mi", "Gi", "Ti"), (2**10, 2**20, 2**30, 2**40), strict=True))


def human_readable_int(text: str) -> int:
    """A number with or without a unit, as SGLang reads one: 64k is 64,000, and 64Ki 65,536.

    Raises:
        ArgumentTypeError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT])|(\d+)([KMGT]i)", text.strip())
    if match is not None:
        number, unit, whole, unit_of_1024 = match.groups()
        return (
            int(Decimal(number) * _THOUSANDS[unit]) if unit else int(whole) * _OF_1024[unit_of_1024]
        )
    try:
        return int(text)
    except ValueError:
        message = f"invalid int value: {text!r}"
        raise argparse.ArgumentTypeError(message) from None


# Types of the file -> the function that reads a value. Other values stay texts.
TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "human_readable_int": human_readable_int,
    "loads": json.loads,
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(COMMAND, required="; ".join(explained(self, message, REMOVED)))


@cache
def rows() -> Sequence[Mapping[str, Any]]:
    """The rows of the file, one for each setting of the command line: `flags`, all spellings;
    `name` of the field; `takes`, "switch", "on or off" or the `nargs` of argparse; the name
    of its `type`; its `choices`; and `in_file`, false if a file of flags cannot have it."""
    return json.loads(FILE.read_text())


def parser() -> argparse.ArgumentParser:
    """A server's parser. What is not given does not appear in what it has parsed; --help is a
    switch like another. It raises ConfigError where a server's ends the process."""
    flag_parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for row in rows():
        takes, keywords = row.get("takes"), dict[str, Any](dest=row["name"])
        if takes == "switch":
            keywords["action"] = "store_true"
        elif takes == "on or off":
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            reads = TYPES.get(row.get("type", ""))
            keywords |= {"nargs": takes, "choices": row.get("choices"), "type": reads}
        # argparse adds the other form of "on or off" itself.
        flags = row["flags"][:1] if takes == "on or off" else row["flags"]
        flag_parser.add_argument(*flags, **keywords)
    return flag_parser


def after_program(words: Sequence[str]) -> list[str]:
    """The words that a server's parser gets of a command, with the target behind `sglang serve` as
    the flag that it stands for. Without a program that is known, those from the first flag on."""
    for at, word in enumerate(words):
        rest = list(words[at + 1 :])
        if word == "sglang.launch_server" or Path(word).name == "launch_server.py":
            return rest
        if has_serve(words[at : at + 2]):
            return _of_serve(rest[1:])
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    return list(words[first:])


def has_serve(command: Sequence[str]) -> bool:
    """Return whether `sglang serve` is part of a command."""
    pairs = pairwise(command)
    return any(Path(program).name == "sglang" and verb == "serve" for program, verb in pairs)


def _of_serve(words: list[str]) -> list[str]:
    """Without --model-type, which `sglang serve` takes for itself."""
    flag = "--model-type"
    if flag in words:
        at = words.index(flag)
        words = words[:at] + words[at + 2 :]
    words = [word for word in words if not word.startswith(f"{flag}=")]
    return ["--model-path", *words] if words and not words[0].startswith("-") else words


def settings_of(command: Sequence[str]) -> dict[str, Any]:
    """The settings of a command, by name: those that it gives, and those of its file of flags.

    Raises:
        ConfigError: a server would refuse it: it has a flag that there is not, or a value or a file
            that cannot be read.
    """
    flag_parser = parser()
    typed = after_program(command)
    if has_serve(command) and not any(word.partition("=")[0] in TARGET_FLAGS for word in typed):
        why = "--model-path names the target, and `sglang serve` reads it from no file"
        raise ConfigError(COMMAND, required=f"missing; {why}")
    words = with_file(typed, rows())
    namespace, others = flag_parser.parse_known_args(words)
    if others:
        flag_parser.error(f"unrecognized arguments: {' '.join(others)}")
    return vars(namespace)


def known_settings(command: Sequence[str]) -> dict[str, Any] | None:
    """The same for a server that may have more flags than ours: what is unknown is left out, and a
    file of flags is not read. None if a value cannot be read."""
    try:
        return vars(parser().parse_known_args(after_program(command))[0])
    except ConfigError:
        return None
