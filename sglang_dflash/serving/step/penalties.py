"""Penalties at every position of a drafted block, as plain decoding would apply them there.

A penalty depends on the output before a position. For a drafted position, that is the committed
output and the drafts before it: if one of these is rejected, what the target says at the position
is not used. So all positions of a block are penalized at once, and only the entries of drafted
tokens differ between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.batch import ScheduleBatch, record_stream
from sglang_dflash.serving.step.penalty_counts import LENGTH, PENALIZERS


class _Penalty(NamedTuple):
    """One kind of penalty: of every token so far `[R, V]`, and of one more output token
    `[R, 1]`."""

    so_far: Tensor
    per_token: Tensor


class _Stops(NamedTuple):
    """Penalties of min_new_tokens: -inf for tokens that end a request `[R, V]`, 0 for others; and
    the output tokens that are missing before one may end it, `[R, 1]`."""

    penalties: Tensor
    missing: Tensor


class _PenaltiesSoFar(NamedTuple):
    """Penalties after the output before a block; None for a kind that no request has."""

    frequency: _Penalty | None
    presence: _Penalty | None
    repetition: _Penalty | None
    stops: _Stops | None

    @classmethod
    def of(cls, orchestrator: Any) -> _PenaltiesSoFar:
        """Read the penalties from SGLang's penalizers."""
        prepared = {
            type(penalizer).__name__: penalizer
            for penalizer in orchestrator.penalizers.values()
            if penalizer.is_prepared()
        }

        def fields(penalizer: Any, *names: str) -> tuple[Tensor, ...]:
            tensors = tuple(getattr(penalizer, name) for name in names)
            for tensor in tensors:
                # The scheduler may replace it before the device has read it.
                record_stream(tensor)
            return tensors

        def penalty(name: str) -> _Penalty | None:
            penalizer, names = prepared.get(name), PENALIZERS[name]
            return (
                None
                if penalizer is None
                else _Penalty(*fields(penalizer, names.counts, names.penalty))
            )

        stops = prepared.get("BatchedMinNewTokensPenalizer")
        if stops is not None:
            penalties, least, length = fields(
                stops, "stop_token_penalties", "min_new_tokens", LENGTH
            )
            stops = _Stops(penalties, least - length)
        return cls(
            penalty("BatchedFrequencyPenalizer"),
            penalty("BatchedPresencePenalizer"),
            penalty("BatchedRepetitionPenalizer"),
            stops,
        )


class BlockPenalties:
    """The penalties of a step, and what a step commits until the next one counts it."""

    def __init__(self, rows: int, verify_block: int, device: torch.device) -> None:
        """
        Args:
            rows: of SGLang's request-to-token table.
        """
        self._tokens = torch.zeros(rows, verify_block, dtype=torch.int64, device=device)
        self._lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self._orchestrator: Any = None

    def commit(self, batch: ScheduleBatch, tokens: Tensor, lengths: Tensor | None = None) -> None:
        """Remember what a step commits, if a request of the batch has penalties.

        Args:
            tokens: int `[R, W]`, the committed ones first. SGLang's sampler gives int32.
            lengths: int64 `[R]`, how many are committed, 1 to W. None for one each.
        """
        info = batch.sampling_info
        if info is not None and sampling.has_penalties(info):
            rows = batch.req_pool_indices.long()
            self._tokens[rows, : tokens.shape[1]] = tokens.long()
            if lengths is None:
                self._lengths.index_fill_(0, rows, 1)
            else:
                self._lengths[rows] = lengths

    def newest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of each request's last step, int64 `[R, verify_block]`, and a
        mask of the committed ones, bool of that shape."""
        tokens, lengths = self._tokens[rows], self._lengths[rows, None]
        return tokens, torch.arange(tokens.shape[1], device=tokens.device) < lengths

    def begin(self, orchestrator: Any) -> None:
        """Begin a decode step whose penalties SGLang's `orchestrator` has counted."""
        self._orchestrator = orchestrator

    def apply(self, logits: Tensor, block: Tensor) -> None:
        """Penalize the positions after the first, in place.

        Args:
            logits: `[R, W, V]`, as the target computed them.
            block: int64 `[R, W]`, the last step's bonus token, then the drafted tokens.

        Raises:
            RuntimeError: `begin` was not called in this step.
        """
        orchestrator, self._orchestrator = self._orchestrator, None
        if orchestrator is None:
            raise RuntimeError("a block's penalties were not counted before its forward")
        penalties = _PenaltiesSoFar.of(orchestrator)
        drafts = block[:, 1:]
        after = logits[:, 1:]
        index = drafts[:, None].expand(-1, drafts.shape[1], -1)
        special = _of_drafts(penalties, after.gather(2, index), drafts)
        terms = _terms(penalties)
        for position in range(drafts.shape[1]):
            _penalize(penalties, after[:, position], terms, position + 1)
        after.scatter_(2, index, special.to(logits.dtype))


def _terms(penalties: _PenaltiesSoFar) -> Tensor | float:
    """Return the terms that the output before the block adds to logits, `[R, V]`, without those of
    min_new_tokens."""
    terms: Tensor | float = 0.0
    for penalty in (penalties.frequency, penalties.presence):
        if penalty is not None:
            terms = terms - penalty.so_far
    return terms


def _penalize(
    penalties: _PenaltiesSoFar, logits: Tensor, terms: Tensor | float, drafts: int
) -> None:
    """Penalize `[R, V]` logits behind so many drafts, but for the drafts themselves, in place."""
    logits += terms
    if penalties.stops is not None:
        is_held = penalties.stops.missing > drafts
        logits += torch.where(is_held, penalties.stops.penalties, 0.0)
    if penalties.repetition is not None:
        logits.copy_(_scaled(logits, penalties.repetition.so_far))


def _of_drafts(penalties: _PenaltiesSoFar, logits: Tensor, drafts: Tensor) -> Tensor:
    """Penalized logits `[R, D, D]`, behind each draft, of every drafted token of the block.

    Args:
        logits: `[R, D, D]`, as the target computed them; changed in place.
        drafts: int64 `[R, D]`.
    """
    # [R, position, token]: how often the token is among the drafts up to this one.
    count = (drafts[:, :, None] == drafts[:, None]).long().cumsum(1)

    def at_drafts(table: Tensor) -> Tensor:
        return table.gather(1, drafts)[:, None]

    # Summed up before they are added, as SGLang does: one after the other, they round differently.
    terms: Tensor | float = 0.0
    if penalties.frequency is not None:
        terms = terms - _counted_up(count, penalties.frequency, at_drafts)
    if penalties.presence is not None:
        terms = terms - _if_drafted(count, penalties.presence, at_drafts)
    logits += terms
    if penalties.stops is not None:
        position = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        is_held = penalties.stops.missing[..., None] > position[:, None]
        logits = logits + torch.where(is_held, at_drafts(penalties.stops.penalties), 0.0)
    if penalties.repetition is not None:
        logits = _scaled(logits, _if_drafted(count, penalties.repetition, at_drafts))
    return logits


def _counted_up(count: Tensor, penalty: _Penalty, at_drafts: Callable[[Tensor], Tensor]) -> Tensor:
    """A token's penalty, which grows with its count, `[R, D, D]`. It is added once per draft, as
    SGLang counts: a product rounds differently."""
    sums = [at_drafts(penalty.so_far)]
    for _ in range(count.shape[1]):
        sums.append(sums[-1] + penalty.per_token[..., None])
    return torch.cat(sums, 1).gather(1, count)


def _if_drafted(count: Tensor, penalty: _Penalty, at_drafts: Callable[[Tensor], Tensor]) -> Tensor:
    """A token's penalty, which does not grow with its count, `[R, D, D]`."""
    return torch.where(count > 0, penalty.per_token[..., None], at_drafts(penalty.so_far))


def _scaled(logits: Tensor, factors: Tensor) -> Tensor:
    return torch.where(logits < 0, logits * factors, logits / factors)
