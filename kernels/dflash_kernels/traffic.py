"""Memory traffic of a launch. Every op has a `traffic` function beside its launcher.

Counted are the bytes that the loads and stores of all programs name, masked lanes left out: what
one program reads twice, or two programs read, counts twice, although a cache may serve it.
"""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes that the programs of one launch load and store."""

    read_bytes: int
    written_bytes: int

    def __add__(self, other: object) -> Traffic:
        """Bytes of both launches."""
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes)
