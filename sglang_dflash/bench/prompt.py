"""`Prompt`, what a client sends."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """A user's turns.

    `chat`: whether they go through the chat template; otherwise they are one text to continue, to
    which each later turn is added after the answer to the turn before.
    """

    turns: tuple[str, ...]
    chat: bool
