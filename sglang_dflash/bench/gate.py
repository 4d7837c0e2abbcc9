"""No figure without exactness: every arm's answers against the first arm's."""

from __future__ import annotations

from typing import NamedTuple

from sglang_dflash.bench.load import Answer, Pass

# Data set and concurrency -> arm -> one pass per round. All arms have the same order of prompts.
Runs = dict[tuple[str, int], dict[str, list[Pass]]]


class OutputsDiffer(RuntimeError):
    """An arm's answer differs from the first arm's."""


class Difference(NamedTuple):
    """The place at which an answer first differs from the first arm's.

    `position`: in tokens, or in characters if a server names no token ids; see `unit`.
    """

    dataset: str
    concurrency: int
    arm: str
    first_arm: str
    prompt: int
    position: int
    unit: str

    def __str__(self) -> str:
        return (
            f"arm {self.arm}, data set {self.dataset}, prompt {self.prompt}, "
            f"concurrency {self.concurrency}: the answer differs from {self.first_arm}'s "
            f"from {self.unit} {self.position} on"
        )


def differences(runs: Runs, first_arm: str) -> list[Difference]:
    """All answers that differ from the first arm's in the same round, of rounds that both have."""
    found = []
    for (dataset, concurrency), by_arm in runs.items():
        for arm, passes in by_arm.items():
            for reference, other in zip(by_arm.get(first_arm, ()), passes, strict=False):
                pairs = zip(reference.answers, other.answers, strict=True)
                for prompt, (a, b) in enumerate(pairs):
                    # Turns after the first difference have different histories.
                    places = (_first_difference(x, y) for x, y in zip(a, b, strict=True))
                    place = next(filter(None, places), None)
                    if place is not None:
                        found.append(
                            Difference(dataset, concurrency, arm, first_arm, prompt, *place)
                        )
    return found


def _first_difference(a: Answer, b: Answer) -> tuple[int, str] | None:
    """Position and unit; None if the answers are the same."""
    ids = a.ids is not None and b.ids is not None
    x, y = (a.ids or (), b.ids or ()) if ids else (a.text, b.text)
    if x == y:
        return None
    unequal = (i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q)
    return next(unequal, min(len(x), len(y))), "token" if ids else "character"
