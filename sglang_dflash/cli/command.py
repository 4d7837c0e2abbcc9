"""What a sub-command is."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class Failed(Exception):
    """A valid request that could not be carried out. The message gives the reason."""


class Command(NamedTuple):
    """A sub-command: its help line and the name of its module.

    The module has the functions `arguments` and `run`. It is imported only if it is asked for.
    """

    help: str
    module: str

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        importlib.import_module(self.module).arguments(parser)

    def run(self, args: argparse.Namespace) -> None:
        """Print the result. Raises ConfigError or Failed if there is none."""
        importlib.import_module(self.module).run(args)
