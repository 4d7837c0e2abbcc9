"""A server's command line before SGLang is imported: what can be seen to be wrong at once."""

from __future__ import annotations

import errno
import multiprocessing
import re
import socket
from collections.abc import Iterator, Sequence
from os.path import exists
from pathlib import Path

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft, shown_pair
from sglang_dflash.facts.hub import check_path
from sglang_dflash.facts.origin import published_draft
from sglang_dflash.facts.published import check_target_folder
from sglang_dflash.facts.target_config import TargetGeometry

TARGET = ("--model-path", "--model")
DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
_READ = (
    *TARGET, *DRAFT, "--speculative-algorithm", "--speculative-dflash-worker",
    "--enable-return-aux-hidden-states",
)  # fmt: skip
_NAMES = {"target": TARGET[0], "draft": DRAFT[0]}


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag and the words up to the next one. What stands before the first is the program."""
    flag, values = None, list[str]()
    for word in words:
        if not re.match(r"-\D", word):
            values.append(word)
            continue
        if flag is not None:
            yield flag, values
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
    if flag is not None:
        yield flag, values


def listens(argv: Sequence[str]) -> bool:
    """Whether it is the command of `python -m sglang.launch_server` or `sglang serve`."""
    return Path(argv[0]).name == "launch_server.py" or _is_serve(argv)


def asks_for_help_of_serve(argv: Sequence[str]) -> bool:
    """Whether it is `sglang serve` with --help, which SGLang answers without its plugins."""
    return _is_serve(argv) and not {"-h", "--help"}.isdisjoint(argv)


def _is_serve(argv: Sequence[str]) -> bool:
    return Path(argv[0]).name == "sglang" and list(argv[1:2]) == ["serve"]


def refuse_early(argv: Sequence[str]) -> None:
    """End the process with one line if a server with this command line could not start.

    The servers' own checks come after half a minute of imports, and judge the rest: also a command
    line that only their parser can read.

    Raises:
        SystemExit: with status 1.
    """
    # Its children have the same command line.
    if not listens(argv) or multiprocessing.parent_process() is not None:
        return
    given = {flag: " ".join(values) for flag, values in flags_of(argv[1:])}
    if any(map(_needs_the_parser, given)):
        return
    try:
        _check(given)
    except ConfigError as error:
        raise SystemExit(f"sglang-dflash: {error.named(_NAMES)}") from None


def _needs_the_parser(flag: str) -> bool:
    """Whether it asks for help, names a file of flags, or may be short for one read here."""
    if flag in ("-h", "--config"):
        return True
    return flag not in _READ and any(name.startswith(flag) for name in ("--help", *_READ))


def _check(given: dict[str, str]) -> None:
    """Raise ConfigError."""
    target, draft = (
        next((given[name] for name in names if given.get(name)), None) for names in (TARGET, DRAFT)
    )
    if target is not None:
        check_path("target", target)
    if given.get("--speculative-algorithm", "").upper() != "DFLASH" or target is None:
        return
    if "--enable-return-aux-hidden-states" in given:
        # No draft: the algorithm is only whose layer numbers are meant.
        return
    check_target_folder(target)
    if draft is None:
        published_draft(target)
        return
    check_path("draft", draft)
    if exists(draft) and given.get("--speculative-dflash-worker") != "builtin":
        _check_pair(target, draft)


def _check_pair(target: str, draft: str) -> None:
    """Compare two folders. Raises ConfigError."""
    try:
        config = DraftConfig.from_pretrained(draft)
    except UnsupportedDraft:
        return
    if not (Path(target) / "config.json").is_file():
        return
    try:
        of = TargetGeometry.from_pretrained(target)
    # SGLang may read what is not read here.
    except ConfigError:
        return
    config.check_target(
        hidden_size=of.hidden_size,
        vocab_size=of.vocab_size,
        num_layers=of.num_hidden_layers,
        pair=shown_pair(draft, target),
    )


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if another program listens there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                required = f"another program listens there, at {host}; end it, or give another port"
                raise ConfigError("port", port, required) from None
