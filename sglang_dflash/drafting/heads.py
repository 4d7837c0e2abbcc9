"""Draft heads: what turns the draft's hidden states into drafted tokens.

A head is a class here and a line in `make_head`. Its calls are recorded in CUDA graphs: they read
nothing on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import PLAIN, RULES, BlockNoise, LogitScale
from sglang_dflash.drafting.ops import TorchOps, candidate_scores
from sglang_dflash.drafting.parallel import (
    TensorParallel,
    argmax_of_shards,
    candidates_of_ranks,
    largest_of_ranks,
    taken_of_shards,
)
from sglang_dflash.drafting.selector import CandidateSelector


class DraftHead(Protocol):
    """Hidden states `[R, B, E]`, the first ones the bonus tokens', to drafted tokens."""

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        """Draft what follows the bonus tokens int64 `[R]`.

        Returns:
            Ids int64, -1 where the draft computed nothing finite. Without noise `[R, B - 1]`, the
            likeliest tokens. With noise `[2, R, B - 1]`: the likeliest tokens, and the coupled ones
            (`noise.RULES`).
        """

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        """By how much other tokens, int64 `[R, B - 1]`, are less likely than the ones that
        `__call__` takes, with noise less likely than the coupled ones: float32 `[R, B - 1]`, as a
        share of the largest score. For checks."""


@dataclass(frozen=True)
class TargetHead:
    """The embedding and lm_head that drafts use: the target's, or the draft's own.

    Attributes:
        embed: ids int64 `[N]` -> embeddings `[N, E]`.
        logits: hidden states `[N, E]` -> `[N, V / ranks]`, this rank's part of the vocabulary.
        first_id: the number of this rank's first column.
        token_ids: int64 `[V]`, ascending, the token of each column of all ranks; None if a column's
            number is its token.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    first_id: int = 0
    token_ids: Tensor | None = None

    def tokens(self, columns: Tensor) -> Tensor:
        """The tokens of columns, int64; -1 for -1."""
        if self.token_ids is None:
            return columns
        return self.token_ids[columns].where(columns >= 0, -1)

    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of tokens, int64; -1 for tokens that have none."""
        if self.token_ids is None:
            return tokens
        at = torch.searchsorted(self.token_ids, tokens).clamp(max=len(self.token_ids) - 1)
        return at.where(self.token_ids[at] == tokens, -1)


@dataclass(frozen=True)
class ArgmaxHead:
    """The head of DFlash v1: the token of the largest logit, at every position."""

    target: TargetHead
    tp: TensorParallel
    ops: TorchOps
    scale: LogitScale = PLAIN

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        logits, first_id = self.target.logits(hidden[:, 1:].flatten(0, 1)), self.target.first_id
        if noise is None:
            drafted = argmax_of_shards(logits, first_id, self.tp)
            return self.target.tokens(drafted).unflatten(0, (len(hidden), -1))
        token_ids = self.target.token_ids
        best, columns = self.ops.largest(logits, noise, first_id, self.scale, token_ids)
        drafted = largest_of_ranks(best.flatten(), columns.flatten(), self.tp)
        return self.target.tokens(drafted).view(len(RULES), len(hidden), -1)

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        return _by_request(self._gaps, hidden, bonus, ids, noise)

    def _gaps(
        self, hidden: Tensor, _bonus: Tensor, ids: Tensor, noise: BlockNoise | None
    ) -> tuple[Tensor, Tensor]:
        logits, first_id = (
            self.target.logits(hidden[:, 1:].flatten(0, 1)).float(),
            self.target.first_id,
        )
        if noise is not None:
            tokens = self.target.tokens(torch.arange(logits.shape[1], device=ids.device) + first_id)
            by_request = logits.unflatten(0, (len(ids), -1))
            logits = noise.scores(by_request, tokens, scale=self.scale).flatten(0, 1)
        columns = self.target.columns(ids.flatten()) - first_id
        own = taken_of_shards(logits, columns, self.tp)
        parts = torch.stack((logits.amax(1), logits.abs().amax(1)))
        best, scale = self.tp.all_gather(parts).amax(0)
        return (best - own).view(ids.shape), scale.amax()


@dataclass(frozen=True)
class SelectorHead:
    """The head of DFlash2: a walk over the likeliest tokens of each position, in which each token
    depends on the one before it.

    `CandidateSelector` in SGLang's `srt/models/dflash.py` computes the same from a lattice of all
    pairs of candidates. A walk needs the row of the token that was taken only.

    Letters in shapes: K candidates.
    """

    selector: CandidateSelector
    target: TargetHead
    tp: TensorParallel
    scale: LogitScale
    ops: TorchOps

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        drafts, selector = hidden[:, 1:], self.selector
        logits, ids = self._candidates(self.target.logits(drafts.flatten(0, 1)))
        shape = (*drafts.shape[:2], selector.top_k)
        return self.ops.walk(
            self.scale(logits).view(shape),
            ids.view(shape),
            selector.hidden_projection(drafts),
            bonus,
            selector.predecessor_codebook,
            selector.successor_codebook,
            noise,
        )

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logits `[N, K]` of all ranks, in descending order, and their tokens."""
        values, columns = self.ops.candidates(logits, self.selector.top_k)
        columns = columns + self.target.first_id
        return candidates_of_ranks(values, self.target.tokens(columns), self.tp)

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        return _by_request(self._gaps, hidden, bonus, ids, noise)

    def _gaps(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None
    ) -> tuple[Tensor, Tensor]:
        drafts, selector = hidden[:, 1:], self.selector
        logits = self.target.logits(drafts.flatten(0, 1))
        values, candidates = self._candidates(logits)
        columns = self.target.columns(ids.flatten()) - self.target.first_id
        own = taken_of_shards(logits, columns, self.tp)
        # What was taken, then the candidates.
        tokens = torch.cat((ids[..., None], candidates.view(*ids.shape, -1)), -1)
        unary = self.scale(torch.cat((own[:, None], values.float()), -1)).view(tokens.shape)
        before = torch.cat((bonus[:, None], ids[:, :-1]), 1)
        tables = selector.predecessor_codebook, selector.successor_codebook
        scores = candidate_scores(
            unary, tokens, selector.hidden_projection(drafts), before, *tables
        )
        if noise is not None:
            scores = noise.scores(scores, tokens)
        return scores[..., 1:].amax(-1) - scores[..., 0], scores[..., 1:].abs().amax()


def _by_request(
    gaps: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    bonus: Tensor,
    ids: Tensor,
    noise: BlockNoise | None,
) -> Tensor:
    """A `shortfall` of R requests, one after the other: the scores of a whole batch, whose noise is
    float64, are gigabytes.

    Args:
        gaps: of some requests, how much smaller the scores of `ids` are than the largest ones, and
            the largest score.
    """
    parts = []
    for request in range(len(ids)):
        row = slice(request, request + 1)
        own_noise = None if noise is None else BlockNoise(*(part[row] for part in noise))
        parts.append(gaps(hidden[row], bonus[row], ids[row], own_noise))
    short, largest = zip(*parts, strict=True)
    return torch.cat(short) / torch.stack(largest).amax()


def make_head(model: DraftModel, target: TargetHead) -> DraftHead:
    """The head that the draft was trained with. `DraftConfig` refuses others."""
    config = model.config
    if model.lm_head is not None:
        first_id = model.tp.rank * model.lm_head.out_features
        target = TargetHead(target.embed, model.lm_head, first_id, model.token_ids)
    scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)
    if model.candidate_selector is not None:
        return SelectorHead(model.candidate_selector, target, model.tp, scale, model.ops)
    return ArgmaxHead(target, model.tp, model.ops, scale)
