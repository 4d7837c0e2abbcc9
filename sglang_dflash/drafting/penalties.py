"""Penalties at the positions of a drafted block, of counts that SGLang keeps.

Letters in shapes: R requests; W positions of a step; V tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Penalty(NamedTuple):
    """One kind of penalty.

    Attributes:
        so_far: float32 `[R, V]`, contiguous, of every token after the output before the block;
            neutral for a token that is not in it.
        per_token: float32 `[R, 1]`, of a token that is put out once. If it is neutral, so is
            `so_far`.
    """

    so_far: Tensor
    per_token: Tensor


class Stops(NamedTuple):
    """Penalties of min_new_tokens.

    Attributes:
        penalties: float32 `[R, V]`, rows of any stride: -inf for tokens that end a request, 0 for
            others.
        least: int32 `[R, 1]`, the output tokens before one of them may end it.
        outputs: int32 `[R, 1]`, the output tokens before the block.
    """

    penalties: Tensor
    least: Tensor
    outputs: Tensor


class Penalties(NamedTuple):
    """The kinds of penalties; None for one that no request has. Frequency and presence are
    subtracted and have 0 as their neutral value, repetition is a factor and has 1."""

    frequency: Penalty | None = None
    presence: Penalty | None = None
    repetition: Penalty | None = None
    stops: Stops | None = None


def penalize(logits: Tensor, block: Tensor, penalties: Penalties) -> None:
    """Penalize the positions after the first as plain decoding would there, in place.

    A penalty depends on the output before a position: what was committed, and the drafts up to
    this one.

    Args:
        logits: `[R, W, V]`, floating-point.
        block: int64 `[R, W]`, the last step's bonus token, then the drafted tokens, all among V.
        penalties: after the output before the block, its bonus token included.
    """
    frequency, presence, repetition = map(_copied, penalties[:3])
    stops = penalties.stops
    for position in range(1, block.shape[1]):
        draft, after = block[:, position, None], logits[:, position]
        terms = []
        if frequency is not None:
            # It is added once per draft, as SGLang counts: a product rounds differently.
            terms.append(frequency.so_far.scatter_add_(1, draft, frequency.per_token))
        if presence is not None:
            terms.append(presence.so_far.scatter_(1, draft, presence.per_token))
        if terms:
            # Summed up before they are subtracted, as SGLang does.
            after -= sum(terms[1:], terms[0])
        if stops is not None:
            is_held = stops.least - stops.outputs > position
            after += torch.where(is_held, stops.penalties, 0.0)
        if repetition is not None:
            factors = repetition.so_far.scatter_(1, draft, repetition.per_token)
            after.copy_(torch.where(after < 0, after * factors, after / factors))


def _copied(penalty: Penalty | None) -> Penalty | None:
    """The same with a table of its own, to count drafts in."""
    return None if penalty is None else penalty._replace(so_far=penalty.so_far.clone())
