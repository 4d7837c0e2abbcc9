"""What `continue_seen` proposes, by its description: loops over lists."""

from __future__ import annotations

from sglang_dflash.drafting.lookup import LONG_MATCH, LONGEST_MATCH, SHORT_MATCH


def agreement(text: list[int], end: int) -> int:
    """How many tokens up to position `end` equal the last ones of a text."""
    length = 0
    while length < min(LONGEST_MATCH, end + 1) and text[end - length] == text[-1 - length]:
        length += 1
    return length


def continued(text: list[int], drafts: list[int], vocab_size: int) -> tuple[list[int], bool]:
    """The drafts after a text, which ends with its newest token, and whether they are replaced."""
    length, end = max(((agreement(text, end), end) for end in range(len(text) - 1)), default=(0, 0))
    if length == 0:
        return drafts, False
    grown = list(text)
    for i in range(len(drafts)):
        grown.append(grown[end + 1 + i])
    seen = grown[len(text) :]
    if length < LONG_MATCH and not (length >= SHORT_MATCH and seen[0] == drafts[0]):
        return drafts, False
    return [s if 0 <= s < vocab_size else d for s, d in zip(seen, drafts, strict=True)], True
