"""The split: files that both models learn from, and files that neither has seen.

The split is by file. A training file that shares more than `MOST_SHARED` of its own passages, or of
a held-out file's, with the held-out part is left out of training, so that no held-out text is known
from a near copy.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from . import data

# A passage is a run of this many lines, without blank lines and indentation.
PASSAGE_LINES = 4
MOST_SHARED = 0.05


@dataclass(frozen=True)
class Split:
    """File name -> text. `near_copies`: training files that were left out."""

    train: dict[str, str]
    held_out: dict[str, str]
    near_copies: tuple[str, ...]

    def digest(self) -> str:
        """SHA-256 over the names and texts of both parts, in order."""
        parts = [
            sorted((name, hashlib.sha256(text.encode()).hexdigest()) for name, text in part.items())
            for part in (self.train, self.held_out)
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load_split() -> Split:
    """This Python's standard library, see `data.load_files`."""
    return split(*data.load_files())


def split(train: dict[str, str], held_out: dict[str, str]) -> Split:
    """Leave near copies of held-out files out of `train`."""
    held = {name: passages(text) for name, text in held_out.items()}
    every_held = set().union(*held.values())
    near = []
    for name, text in train.items():
        own = passages(text)
        common = own & every_held
        of_held = [len(common & of) / max(1, len(of)) for of in held.values()]
        if max([len(common) / max(1, len(own)), *of_held]) > MOST_SHARED:
            near.append(name)
    return Split({n: t for n, t in train.items() if n not in near}, held_out, tuple(near))


def passages(text: str) -> set[str]:
    """Every run of `PASSAGE_LINES` lines, blank lines and indentation aside."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {"\n".join(lines[i : i + PASSAGE_LINES]) for i in range(len(lines) - PASSAGE_LINES + 1)}
