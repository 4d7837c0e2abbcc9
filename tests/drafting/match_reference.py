"""Reference for `find_match`, written from its description: loops over lists."""

from __future__ import annotations

from sglang_dflash.drafting.text_match import LONGEST_MATCH, SHORTEST_MATCH


def agreement(text: list[int], end: int) -> int:
    """Return the number of tokens up to position `end` that equal the text's last ones."""
    length = 0
    while length < min(LONGEST_MATCH, end + 1) and text[end - length] == text[-1 - length]:
        length += 1
    return length


def continued(text: list[int], count: int) -> tuple[int, list[int]]:
    """The match of a text, which ends with its newest token, and the tokens that follow it; 0 and
    none if fewer than `SHORTEST_MATCH` tokens agree."""
    length, end = max(((agreement(text, end), end) for end in range(len(text) - 1)), default=(0, 0))
    if length < SHORTEST_MATCH:
        return 0, []
    grown = list(text)
    for i in range(count):
        grown.append(grown[end + 1 + i])
    return length, grown[len(text) :]
