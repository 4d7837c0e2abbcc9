"""The head of DFlash v1, and what another head may override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.heads.head import Around, DraftHead, TargetHead, unchanged
from sglang_dflash.drafting.noise import LIKELIEST, BlockNoise, LogitScale, SampledBlocks
from sglang_dflash.drafting.ops import Edges, TorchOps, candidate_scores
from sglang_dflash.drafting.parallel import (
    TensorParallel,
    argmax_of_shards,
    candidates_of_ranks,
    taken_of_shards,
)
from sglang_dflash.drafting.random_inputs import Cases, RandomInputs

# (kernel, its shape ...) -> bytes of one launch, by the `traffic` of `dflash_kernels.KERNEL`.
KernelBytes = Callable[..., int]
# (logits, ids, bonus, edges) of `TorchOps.walk`
Walk = tuple[Tensor, Tensor, Tensor, Edges | None]


class HeadModule(nn.Module):
    """The part of a draft network that is its head's. In drafts of v1 it has no weights.

    Another head is a subclass. Its parameters have the names and shapes of
    `HeadConfig.tensors`, and are whole on every rank. A matrix is an `nn.Linear` that is called:
    on a CPU its weight is packed. What it computes for a proposal is recorded in CUDA graphs: it
    reads nothing on the host.

    Args:
        tp: this rank of the group that the network is split over.
        ops: the fused operations of the network.
    """

    def __init__(self, config: DraftConfig, tp: TensorParallel, ops: TorchOps) -> None:
        super().__init__()
        self.config, self.tp, self.ops = config, tp, ops
        self.scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)

    def around(self, layer: int) -> tuple[Around, Around]:
        """Return what stands around attention and around the MLP of a layer, by its number."""
        return unchanged, unchanged

    def over(self, target: TargetHead) -> DraftHead:
        """The head over an embedding and lm_head."""
        return CandidateHead(target, self)

    @property
    def candidates(self) -> int:
        """K, the tokens that a draft of a sampled request is drawn from."""
        vocabulary = self.config.draft_vocab_size or self.config.vocab_size
        return min(self.config.head.candidates, vocabulary // self.tp.size)

    def edges(self, drafts: Tensor) -> Edges | None:
        """Return what scores of candidates depend on besides logits, of the drafts' hidden states
        `[R, P, E]`; None for nothing."""
        return None

    def check_cases(self, draw: RandomInputs, requests: int, block: int) -> Cases:
        """The fused operations of this head, on random inputs, for the check at start-up: it
        compares the results of `ops` with torch's.

        Args:
            block: B, tokens of the block that the draft fills.
        """
        vocab_size, k = self.config.vocab_size, self.candidates
        vocabulary = (self.config.draft_vocab_size or vocab_size) // self.tp.size
        logits = draw.floats(requests, vocabulary)
        shape = requests, block - 1, k
        edges = self.edges(draw.floats(*shape[:2], self.config.hidden_size))
        bonus = draw.ints(0, vocab_size, requests)
        walk = draw.floats(*shape).float(), draw.ints(0, vocab_size, *shape), bonus, edges
        temperatures = torch.linspace(0.0, 1.5, requests, device=draw.device)
        noise = BlockNoise(
            draw.ints(0, 2**62, requests), temperatures, draw.ints(0, 4096, requests)
        )

        def check_walk(ops: TorchOps) -> Sequence[Tensor]:
            tokens, scores = ops.walk(*walk, noise)
            return [
                _likeness(walk, ops.walk(*walk)[0][None], noise).to(draw.dtype),
                _likeness(walk, tokens, noise).to(draw.dtype),
                # Those of further positions depend on what was taken.
                *(() if scores is None else (scores[:, 0].to(draw.dtype),)),
            ]

        return {"candidates": lambda ops: ops.candidates(logits, k), "walk": check_walk}

    def timed_ops(
        self, logits: Tensor, bonus: Tensor, noise: BlockNoise, kernel_bytes: KernelBytes
    ) -> dict[str, tuple[Callable[[], object], int]]:
        """Operations that `check-gpu` times, by name, each with the fewest bytes that it moves.

        Args:
            logits: `[R * (B - 1), V]`, of all drafts.
            bonus: int64 `[R]`.
            noise: of R sampled requests.
        """
        k, ops, vocabulary = self.candidates, self.ops, self.config.vocab_size
        shape = (len(bonus), len(logits) // len(bonus), k)
        edges = self.edges(logits.new_empty(*shape[:2], self.config.hidden_size).normal_())
        rank = 0 if edges is None else edges.hidden.shape[-1]
        scores = torch.randn(shape, device=logits.device)
        ids = torch.randint(vocabulary, shape, device=logits.device)
        once = logits.numel() * logits.element_size()
        least = kernel_bytes("walk", *shape, rank, logits.element_size(), noise=True)
        return {
            "candidates": (lambda: ops.candidates(logits, k), once),
            "torch.topk": (lambda: logits.topk(k), once),
            "walk": (lambda: ops.walk(scores, ids, bonus, edges, noise), least),
        }


@dataclass(frozen=True)
class CandidateHead:
    """A head that takes one of the likeliest tokens of each position: the token of the largest
    logit, or the next one of a walk, in which each token depends on the one before it.

    Letters in shapes: K candidates; P drafts of a block.

    Attributes:
        module: its part of the draft network.
    """

    target: TargetHead
    module: HeadModule

    def __call__(
        self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None
    ) -> Tensor | SampledBlocks:
        drafts = hidden[:, 1:]
        logits, edges = self.target.logits(drafts.flatten(0, 1)), self.module.edges(drafts)
        if noise is None and edges is None:
            drafted = argmax_of_shards(logits, self.target.first_id, self.module.tp)
            return self.target.tokens(drafted).unflatten(0, drafts.shape[:2])
        values, ids = self._candidates(logits)
        shape = (*drafts.shape[:2], ids.shape[1])
        scaled, ids = self.module.scale(values).view(shape), ids.view(shape)
        tokens, scores = self.module.ops.walk(scaled, ids, bonus, edges, noise)
        return tokens if scores is None else SampledBlocks(tokens, ids, scores)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logits `[N, K]` of all ranks, in descending order, and their tokens."""
        values, columns = self.module.ops.candidates(logits, self.module.candidates)
        if self.target.first_id:
            columns = columns + self.target.first_id
        return candidates_of_ranks(values, self.target.tokens(columns), self.module.tp)

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        # The scores of a whole batch, whose noise is float64, are gigabytes.
        gaps = []
        for request in range(len(ids)):
            row = slice(request, request + 1)
            own_noise = None if noise is None else BlockNoise(*(part[row] for part in noise))
            gaps.append(self._gaps(hidden[row], bonus[row], ids[row], own_noise))
        short, largest = zip(*gaps, strict=True)
        return torch.cat(short) / torch.stack(largest).amax()

    def _gaps(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None
    ) -> tuple[Tensor, Tensor]:
        """Return how much smaller the scores of `ids` are than the largest ones, and the largest
        score."""
        drafts = hidden[:, 1:]
        logits = self.target.logits(drafts.flatten(0, 1))
        values, candidates = self._candidates(logits)
        columns = self.target.columns(ids.flatten()) - self.target.first_id
        taken = taken_of_shards(logits, columns, self.module.tp)
        # What was taken, then the candidates.
        tokens = torch.cat((ids[..., None], candidates.view(*ids.shape, -1)), -1)
        scores = torch.cat((taken[:, None], values.float()), -1)
        scores = self.module.scale(scores).view(tokens.shape)
        edges, before = self.module.edges(drafts), torch.cat((bonus[:, None], ids[:, :-1]), 1)
        if edges is not None:
            scores = candidate_scores(scores, tokens, before, edges)
        if noise is not None:
            scores = noise.scores(scores, tokens)
        return scores[..., 1:].amax(-1) - scores[..., 0], scores[..., 1:].abs().amax()


def _likeness(walk: Walk, tokens: Tensor, noise: BlockNoise) -> Tensor:
    """1 where a walk's tokens `[rules, R, P]` have the largest score after the tokens before them,
    and less by a share of the largest score where they have not: rounding may decide between two.
    """
    logits, ids, bonus, edges = walk
    likeness = []
    for rule, taken in enumerate(tokens):
        scores, before = logits, torch.cat((bonus[:, None], taken[:, :-1]), 1)
        if edges is not None:
            # What is no token has no likeness.
            before = before.clamp(0, len(edges.predecessors) - 1)
            scores = candidate_scores(scores, ids, before, edges)
        scores = scores if rule == LIKELIEST else noise.scores(scores, ids)
        taken_scores = scores.where(ids == taken[..., None], -torch.inf).amax(-1)
        likeness.append(1 - (scores.amax(-1) - taken_scores) / scores.abs().amax())
    return torch.stack(likeness)
