"""The candidate selector of DFlash2 drafts: a walk over the likeliest tokens of each position, in
which each token depends on the one before it.

From z-lab's DFlash2 (`selector_rank`, `selector_top_k`); `CandidateSelector` in SGLang's
`srt/models/dflash.py` computes the same from a lattice of all pairs of candidates. A walk needs the
row of the token that was taken only.

Letters in shapes: R requests, P drafts of a block, K candidates, r rank, E hidden size, V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sglang_dflash.drafting.noise import BlockNoise, LogitScale
from sglang_dflash.drafting.ops import TorchOps, candidate_scores
from sglang_dflash.drafting.parallel import TensorParallel, candidates_of_ranks, taken_of_shards
from sglang_dflash.facts.draft_config import Selector

if TYPE_CHECKING:
    from sglang_dflash.drafting.heads import TargetHead


class CandidateSelector(nn.Module):
    """The weights. Every rank holds all of them.

    The score of candidate c after token p is its logit + <A[p] * project(hidden), B[c]>.

    Attributes:
        predecessor_codebook: A, `[V, r]`.
        successor_codebook: B, `[V, r]`.
        hidden_projection: `[E]` to `[r]`.
    """

    def __init__(self, width: int, vocab_size: int, of: Selector) -> None:
        super().__init__()
        self.top_k = of.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, of.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, of.rank))
        self.hidden_projection = nn.Linear(width, of.rank, bias=False)


@dataclass(frozen=True)
class SelectorHead:
    """The head of DFlash2. A `DraftHead`."""

    selector: CandidateSelector
    target: TargetHead
    tp: TensorParallel
    scale: LogitScale
    ops: TorchOps

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        drafts, of = hidden[:, 1:], self.selector
        logits, ids = self._candidates(self.target.logits(drafts.flatten(0, 1)))
        shape = (*drafts.shape[:2], of.top_k)
        return self.ops.walk(
            self.scale(logits).view(shape),
            ids.view(shape),
            of.hidden_projection(drafts),
            bonus,
            of.predecessor_codebook,
            of.successor_codebook,
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
        drafts, of = hidden[:, 1:], self.selector
        logits = self.target.logits(drafts.flatten(0, 1))
        values, candidates = self._candidates(logits)
        columns = self.target.columns(ids.flatten()) - self.target.first_id
        own = taken_of_shards(logits, columns, self.tp)
        # What was taken, then the candidates.
        tokens = torch.cat((ids[..., None], candidates.view(*ids.shape, -1)), -1)
        unary = self.scale(torch.cat((own[:, None], values.float()), -1)).view(tokens.shape)
        before = torch.cat((bonus[:, None], ids[:, :-1]), 1)
        tables = of.predecessor_codebook, of.successor_codebook
        scores = candidate_scores(unary, tokens, of.hidden_projection(drafts), before, *tables)
        if noise is not None:
            scores = noise.scores(scores, tokens)
        short = scores[..., 1:].amax(-1) - scores[..., 0]
        return short / scores[..., 1:].abs().amax()
