"""Torch replacements of SGLang's Triton functions for hybrid (Gated DeltaNet) models.

Every function takes the name, the arguments and the layouts of the one that it replaces, and has
the same side effects. A slot index below zero marks a padded row: nothing is read or written for
it, and its outputs are zero.
"""

from __future__ import annotations

from torch import Tensor


def real_rows(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a batch that are not padding, and their slots; slots `[N]`, both int64."""
    rows = (slots >= 0).nonzero()[:, 0]
    return rows, slots[rows].long()


def refuse(function: str, **unserved: object) -> None:
    """Raise NotImplementedError if an argument of a feature that this platform lacks is given."""
    arguments = sorted(name for name, value in unserved.items() if value is not None)
    if arguments:
        raise NotImplementedError(
            f"{function}: {', '.join(arguments)} is not served on the plain-CPU platform"
        )
