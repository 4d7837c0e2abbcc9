"""What a sub-command is."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple, Protocol, cast


class Failed(Exception):
    """A valid request that could not be carried out. The message gives the reason."""


class Verb(Protocol):
    """The module of a sub-command.

    `arguments` declares its arguments. `run` prints its result, or raises ConfigError or Failed.
    """

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> None: ...


class Command(NamedTuple):
    """A sub-command: its help line and the name of its module, imported only if it is asked for."""

    help: str
    module: str

    def verb(self) -> Verb:
        return cast(Verb, importlib.import_module(self.module))
