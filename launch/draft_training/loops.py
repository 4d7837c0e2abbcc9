"""Repetition loops of a text."""

from __future__ import annotations


def loop_start(tokens: list[int]) -> int:
    """Start of a tail that repeats one period of at most 40 tokens three times or more; the end if
    there is none."""
    for period in range(1, 41):
        n = len(tokens)
        while n > period and tokens[n - 1] == tokens[n - 1 - period]:
            n -= 1
        if len(tokens) - n >= 2 * period:
            return max(0, n - period)
    return len(tokens)
