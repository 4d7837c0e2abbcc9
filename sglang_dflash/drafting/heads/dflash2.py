"""The head of DFlash2 (z-lab): convolutions in the layers, and a walk over candidates.

Letters in shapes: R requests, B block positions, E hidden size, V tokens, N rows, K candidates or
taps, C groups of channels, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.heads.dflash2 import Convolution, DFlash2Config, Selector
from sglang_dflash.drafting.heads.head import Around, DraftHead, Finish, TargetHead, by_request
from sglang_dflash.drafting.heads.plain import HeadModule, KernelBytes
from sglang_dflash.drafting.noise import LIKELIEST, BlockNoise, LogitScale
from sglang_dflash.drafting.ops import TorchOps, candidate_scores
from sglang_dflash.drafting.parallel import TensorParallel, candidates_of_ranks, taken_of_shards
from sglang_dflash.drafting.random_inputs import Cases, RandomInputs


class DFlash2Module(HeadModule):
    """The weights of DFlash2 beyond v1. Without a selector it drafts as v1.

    Attributes:
        candidate_selector: None if its tokens do not depend on each other.
        layers: the convolutions of each layer; empty without them.
    """

    def __init__(self, config: DraftConfig, tp: TensorParallel, ops: TorchOps) -> None:
        super().__init__(config, tp, ops)
        head, width = cast(DFlash2Config, config.head), config.hidden_size
        self.layers, self.candidate_selector = nn.ModuleList(), None
        if head.convolution is not None:
            for _ in range(config.num_hidden_layers):
                self.layers.append(LayerConvolutions(width, head.convolution, ops))
        if head.selector is not None:
            self.candidate_selector = CandidateSelector(width, config.vocab_size, head.selector)

    def around(self, layer: int) -> tuple[Around, Around]:
        if not self.layers:
            return super().around(layer)
        convolutions = cast(LayerConvolutions, self.layers[layer])
        return convolutions.attention_conv, convolutions.mlp_conv

    def over(self, target: TargetHead) -> DraftHead:
        if self.candidate_selector is None:
            return super().over(target)
        return SelectorHead(self.candidate_selector, target, self.tp, self.scale, self.ops)

    def check_cases(self, draw: RandomInputs, requests: int, block: int) -> Cases:
        config, head, cases = self.config, cast(DFlash2Config, self.config.head), Cases()
        if head.convolution is not None:
            taps, width = head.convolution.kernel_size, config.hidden_size
            x, bias = draw.floats(requests, block, width), draw.floats(width)
            base = draw.floats(taps, width)
            dynamic = draw.floats(requests, block, taps, width // head.convolution.group_size)
            cases["convolve"] = lambda ops: (ops.convolve(x, base, dynamic, bias),)
        weights, selector = self.candidate_selector, head.selector
        if weights is not None and selector is not None:
            vocabulary = (config.draft_vocab_size or config.vocab_size) // self.tp.size
            logits = draw.floats(requests, max(vocabulary, selector.top_k))
            shape = requests, block - 1, selector.top_k
            walk = (
                draw.floats(*shape).float(),
                draw.ints(0, config.vocab_size, *shape),
                draw.floats(*shape[:2], selector.rank),
                draw.ints(0, config.vocab_size, requests),
                weights.predecessor_codebook,
                weights.successor_codebook,
            )
            temperatures = torch.linspace(0.0, 1.5, requests, device=draw.device)
            noise = BlockNoise(
                draw.ints(0, 2**62, requests), temperatures, draw.ints(0, 4096, requests)
            )
            cases["candidates"] = lambda ops: ops.candidates(logits, selector.top_k)
            cases["walk"] = lambda ops: (
                _likeness(walk, ops.walk(*walk)[None], noise).to(draw.dtype),
                _likeness(walk, ops.walk(*walk, noise), noise).to(draw.dtype),
            )
        return cases

    def timed_ops(
        self, logits: Tensor, bonus: Tensor, noise: BlockNoise, kernel_bytes: KernelBytes
    ) -> dict[str, tuple[Callable[[], object], int]]:
        weights, requests = self.candidate_selector, len(bonus)
        if weights is None:
            return {}
        k, ops, vocabulary = weights.top_k, self.ops, self.config.vocab_size
        tables = weights.predecessor_codebook, weights.successor_codebook
        shape, rank = (requests, len(logits) // requests, k), tables[0].shape[1]
        walked = (
            torch.randn(shape, device=logits.device),
            torch.randint(vocabulary, shape, device=logits.device),
            logits.new_empty(*shape[:2], rank).normal_(),
        )
        once = logits.numel() * logits.element_size()
        least = kernel_bytes("walk", *shape, rank, logits.element_size(), noise=True)
        return {
            "candidates": (lambda: ops.candidates(logits, k), once),
            "torch.topk": (lambda: logits.topk(k), once),
            "walk": (lambda: ops.walk(*walked, bonus, *tables, noise), least),
        }


class LayerConvolutions(nn.Module):
    """The convolutions around attention and around the MLP of a layer."""

    def __init__(self, width: int, config: Convolution, ops: TorchOps) -> None:
        super().__init__()
        self.attention_conv = GroupedConvolution(width, config, ops)
        self.mlp_conv = GroupedConvolution(width, config, ops)


class GroupedConvolution(nn.Module):
    """Each position gets a weighted sum of itself and the K - 1 positions before it in its block;
    context K/V does not pass through it. `DFlashGroupedConv` in SGLang computes the same.

    The weights of a channel are a learned kernel plus one that is projected from the input, which
    all channels of a group share. The same projection gives the kernel for the output.
    """

    def __init__(self, width: int, config: Convolution, ops: TorchOps) -> None:
        super().__init__()
        self.ops, self.taps, self.groups = ops, config.kernel_size, width // config.group_size
        # Of the input, then of the output. These weights leave both as they are.
        kernel = torch.zeros(2, self.taps, width)
        kernel[:, 0] = 1.0
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(width, 2 * self.taps * self.groups, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Finish]:
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))

        def finish(out: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
            of_output = dynamic[..., 1, :, :]
            return self.ops.convolve(out, self.base_kernel[1], of_output, bias), None

        return self.ops.convolve(x, self.base_kernel[0], dynamic[..., 0, :, :]), finish


class CandidateSelector(nn.Module):
    """The weights of the candidate selector. Every rank holds all of them.

    The score of candidate c after token p is its logit + <A[p] * project(hidden), B[c]>.

    Attributes:
        predecessor_codebook: A, `[V, r]`.
        successor_codebook: B, `[V, r]`.
        hidden_projection: `[E]` to `[r]`.
    """

    def __init__(self, width: int, vocab_size: int, config: Selector) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(width, config.rank, bias=False)


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
        return by_request(self._gaps, hidden, bonus, ids, noise)

    def _gaps(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None
    ) -> tuple[Tensor, Tensor]:
        drafts, selector = hidden[:, 1:], self.selector
        logits = self.target.logits(drafts.flatten(0, 1))
        values, candidates = self._candidates(logits)
        columns = self.target.columns(ids.flatten()) - self.target.first_id
        taken = taken_of_shards(logits, columns, self.tp)
        # What was taken, then the candidates.
        tokens = torch.cat((ids[..., None], candidates.view(*ids.shape, -1)), -1)
        unary = self.scale(torch.cat((taken[:, None], values.float()), -1)).view(tokens.shape)
        before = torch.cat((bonus[:, None], ids[:, :-1]), 1)
        tables = selector.predecessor_codebook, selector.successor_codebook
        scores = candidate_scores(
            unary, tokens, selector.hidden_projection(drafts), before, *tables
        )
        if noise is not None:
            scores = noise.scores(scores, tokens)
        return scores[..., 1:].amax(-1) - scores[..., 0], scores[..., 1:].abs().amax()


def _likeness(walk: Sequence[Tensor], tokens: Tensor, noise: BlockNoise) -> Tensor:
    """1 where a walk's tokens `[rules, R, P]` have the largest score after the tokens before them,
    and less by a share of the largest score where they have not: rounding may decide between two.
    """
    logits, ids, hidden, bonus, *tables = walk
    likeness = []
    for rule, taken in enumerate(tokens):
        # What is no token has no likeness.
        before = torch.cat((bonus[:, None], taken[:, :-1]), 1).clamp(0, len(tables[0]) - 1)
        scores = candidate_scores(logits, ids, hidden, before, *tables)
        scores = scores if rule == LIKELIEST else noise.scores(scores, ids)
        taken_scores = scores.where(ids == taken[..., None], -torch.inf).amax(-1)
        likeness.append(1 - (scores.amax(-1) - taken_scores) / scores.abs().amax())
    return torch.stack(likeness)
