"""What the published benchmark prints, and the acceptance length behind it.

Acceptance length: tokens kept from verify steps, divided by those steps. An answer's first token is
its prefill's, and what a last step drafts beyond the end of an answer is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RULE = "=" * 50


def kept_per_step(committed: Sequence[int], tokens: int) -> list[int]:
    """Tokens that each verify step of an answer added to it.

    Args:
        committed: tokens that each step committed, beyond the end of the answer too.
        tokens: the answer's tokens, its prefill's included.
    """
    kept, left = [], tokens - 1
    for count in committed:
        kept.append(min(count, left))
        left -= kept[-1]
    return kept


def acceptance_length(kept: int, steps: int) -> float | None:
    """None without a verify step."""
    return kept / steps if steps else None


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
