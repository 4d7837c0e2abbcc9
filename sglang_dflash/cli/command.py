"""What a sub-command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Failed(Exception):
    """A valid request that could not be carried out. The message gives the reason."""


class Command(NamedTuple):
    """A sub-command: its help line, what declares its arguments and what runs it.

    `run` prints its result, or raises ConfigError or Failed.
    """

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
