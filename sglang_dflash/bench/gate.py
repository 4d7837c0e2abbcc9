"""No figure without exactness: every arm's answers against the first arm's."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.bench.load import Answer, Pass

# Data set and concurrency -> arm -> one pass per round. All arms have the same order of prompts.
Runs = dict[tuple[str, int], dict[str, list[Pass]]]


class OutputsDiffer(RuntimeError):
    """An arm's answer differs from the first arm's."""


@dataclass(frozen=True)
class Difference:
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
                for prompt, position, unit in (
                    _compare(reference, other) if arm != first_arm else ()
                ):
                    found.append(
                        Difference(dataset, concurrency, arm, first_arm, prompt, position, unit)
                    )
    return found


def _compare(reference: Pass, other: Pass) -> list[tuple[int, int, str]]:
    """Prompt, position and unit of the first difference of every answer that has one."""
    found = []
    for prompt, (a, b) in enumerate(zip(reference.answers, other.answers, strict=True)):
        # Turns after the first difference have different histories.
        for x, y in zip(a, b, strict=True):
            position = _first_difference(x, y)
            if position is not None:
                found.append((prompt, position, "token" if _by_ids(x, y) else "character"))
                break
    return found


def _by_ids(a: Answer, b: Answer) -> bool:
    return a.ids is not None and b.ids is not None


def _first_difference(a: Answer, b: Answer) -> int | None:
    x, y = (a.ids, b.ids) if a.ids is not None and b.ids is not None else (a.text, b.text)
    if x == y:
        return None
    return next(
        (i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y))
    )
