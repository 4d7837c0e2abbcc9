"""Texts that stand once, in Markdown, for the docs and for a terminal."""

from __future__ import annotations

import re


def plain(markdown: str) -> str:
    """Return the text for a terminal: without code marks, links by their words, and without links
    in parentheses of their own, which lead to more."""
    text = re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", markdown)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
