"""Repetition loops of a text."""

from __future__ import annotations


def loop_start(tokens: list[int]) -> int:
    """Return the start of a tail that repeats at most 40 tokens three times or more; the number of
    tokens if there is none."""
    for period in range(1, 41):
        n = len(tokens)
        while n > period and tokens[n - 1] == tokens[n - 1 - period]:
            n -= 1
        if len(tokens) - n >= 2 * period:
            return max(0, n - period)
    return len(tokens)
