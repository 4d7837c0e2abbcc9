"""Every flag that a message of the package or a page of the docs names is taken by a command."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from experiments import runner
from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import published
from tests.commands import PAGES, ROOT, commands
from tests.test_imports import FILES, name_of, nodes

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
# Of other programs, which no command of a page shows.
FOREIGN = {
    "vllm serve": {
        "--enforce-eager", "--generation-config", "--kv-cache-memory-bytes", "--max-model-len",
        "--max-num-seqs", "--speculative-config",
    },
    "sglang serve, beside a server's": {"--model-type"},
    "uv pip": {"--no-deps"},
    "compute-sanitizer": {"--error-exitcode", "--tool"},
    "launch/demo.sh": {"--check"},
}  # fmt: skip
# Short for a server's --tp-size and the like, and the beginning of several.
SHORT = {
    "--dp", "--pp", "--tp", "--speculative", "--speculative-dflash", "--speculative-dspark",
    "--speculative-ngram",
}  # fmt: skip


@cache
def taken() -> set[str]:
    """Return the flags that our commands and a server take."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server = argparse.ArgumentParser()
    ServerArgs.add_cli_args(server)
    main, verbs = cli._make_parsers()
    for verb, parser in verbs.items():
        cli.module(verb).arguments(parser)
    parsers = (server, main, published.command_line(), *verbs.values())
    return {flag for parser in parsers for flag in parser._option_string_actions}


def messages(path: Path) -> Iterator[str]:
    """Strings of a file that are no docstrings."""
    docstrings = {id(statement.value) for statement in nodes(path, ast.Expr)}
    for node in nodes(path, ast.Constant):
        if id(node) not in docstrings:
            yield str(node.value)


def unknown(named: set[str]) -> set[str]:
    return named - taken() - SHORT - set().union(*FOREIGN.values())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_message_names_flags_that_there_are(path: Path) -> None:
    named = {flag for text in messages(path) for flag in FLAG.findall(text)}
    assert not unknown(named)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_flags_that_there_are(page: Path) -> None:
    """Flags of its commands are tried by `test_commands.py`."""
    printed = {flag for command in commands() for flag in FLAG.findall(command.text)}
    own = set(FLAG.findall((ROOT / "launch/train_draft.py").read_text())) | printed
    for name in runner.experiments():
        own |= set(runner.parser(name)._option_string_actions)
    assert not unknown(set(FLAG.findall(page.read_text()))) - own
