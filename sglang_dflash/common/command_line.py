"""Flags of a command from the fields of a dataclass: type, default and help stand once; and what is
told of a command line that cannot be parsed."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints


def setting(default: Any, help: str, **of_argparse: Any) -> Any:
    """A field that commands offer as a flag.

    Args:
        help: `{default}` in it stands for the default.
        of_argparse: more of `add_argument`'s.
    """
    return field(default=default, metadata={"help": help, **of_argparse})


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def spelled(names: Iterable[str], **others: str) -> dict[str, str]:
    """Setting -> its flag.

    Args:
        others: setting -> its flags, if they have other names or more of them than one.
    """
    return {name: flag_of(name) for name in names} | others


def add_flags(
    parser: Any,
    settings: type,
    names: Mapping[str, str],
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Add a flag for each of `names`.

    A flag of a tuple may be repeated; one of False has no value, one of `bool | None` has a `--no-`
    form. What is not given does not appear in the parsed arguments: see `given`.

    Args:
        parser: of argparse, or a group of one.
        settings: a dataclass.
        names: field -> its spellings, separated by blanks.
        defaults: shown instead of the field's own.
    """
    types, options = get_type_hints(settings), {option.name: option for option in fields(settings)}
    for name, spellings in names.items():
        option = options[name]
        shown = {name: option.default, **(defaults or {})}[name]
        text = option.metadata["help"].replace("{default}", str(shown))
        keywords = {**_kind(types[name]), **option.metadata, "help": text}
        parser.add_argument(*spellings.split(), dest=name, default=argparse.SUPPRESS, **keywords)


def _kind(hint: Any) -> dict[str, Any]:
    """Return argparse's keywords for the values of a field."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is tuple:
        return {"action": "append", "type": get_args(hint)[0]}
    (plain,) = set(get_args(hint) or (hint,)) - {NoneType}
    return {"action": argparse.BooleanOptionalAction} if plain is bool else {"type": plain}


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The fields of `settings` that were given; lists become tuples."""
    names = {option.name for option in fields(settings)}
    values = {name: value for name, value in vars(args).items() if name in names}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def flag_names(parser: argparse.ArgumentParser, argv: Iterable[str] = ()) -> dict[str, str]:
    """Return the name by which an error calls each setting of a command: see `ConfigError.named`.

    Args:
        argv: what was typed. A flag with several spellings is called as there.
    """
    typed = {word.partition("=")[0] for word in argv}
    names = {}
    for action in parser._actions:
        spellings = (*action.option_strings, action.dest.upper())
        names[action.dest] = next((name for name in spellings if name in typed), spellings[0])
    return names


class Parser(argparse.ArgumentParser):
    """A parser whose errors take a line each, and name what was meant, in place of its usage."""

    def error(self, message: str) -> NoReturn:
        end_in_one_line(self, message)


def end_in_one_line(
    parser: argparse.ArgumentParser, message: str, removed: Mapping[str, str] | None = None
) -> NoReturn:
    """End the process with status 2 and what argparse says, in our words: see `explained`."""
    lines = explained(parser, message, removed)
    print("\n".join(f"{parser.prog}: {line}" for line in lines), file=sys.stderr)
    sys.exit(2)


def explained(
    parser: argparse.ArgumentParser, message: str, removed: Mapping[str, str] | None = None
) -> list[str]:
    """Return argparse's message in our words: up to three lines.

    Args:
        message: of `ArgumentParser.error`.
        removed: a setting that the parser had a flag for -> what to use instead.
    """
    unknown = re.fullmatch(r"unrecognized arguments: (.*)", message, re.S)
    lines = [re.sub(r"^argument ", "", message)]
    if unknown is not None:
        words = [word.partition("=")[0] for word in unknown[1].split()]
        flags = [word for word in words if word.startswith("-")]
        lines = [_no_such(flag, parser._option_string_actions, removed or {}) for flag in flags]
        lines = lines or [f"{' '.join(words)}: more than the arguments that are taken"]
    choice = re.match(r"argument ([^:]+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if choice is not None:
        choices = re.findall(r"[^\s',]+", choice[3])
        near = difflib.get_close_matches(choice[2], choices, 1)
        suggestion = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        lines = [f"{choice[1]}: {choice[2]!r}; {suggestion}"]
    return lines[:3]


def _no_such(flag: str, flags: Iterable[str], removed: Mapping[str, str]) -> str:
    instead = removed.get(flag.removeprefix("--").replace("-", "_"))
    if instead is not None:
        return f"{flag}: this flag was removed; {instead}"
    near = difflib.get_close_matches(flag, flags, 1)
    suggestion = f"did you mean {near[0]}?" if near else "--help lists them"
    return f"{flag}: there is no such flag; {suggestion}"
