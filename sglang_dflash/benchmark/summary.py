"""What the published benchmark prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RULE = "=" * 50


def histogram(kept: Iterable[int], block_size: int) -> list[float]:
    """Share of the verify steps that kept 0, 1, ... `block_size` tokens."""
    counts = [0] * (block_size + 1)
    for count in kept:
        counts[count] += 1
    return shares(counts)


def shares(counts: Sequence[int]) -> list[float]:
    """Counts divided by their sum; zeros if that is zero."""
    total = sum(counts) or 1
    return [count / total for count in counts]


def percent(shares: Sequence[float]) -> str:
    """For reading, in the published form."""
    return str([f"{100 * share:.1f}%" for share in shares])
