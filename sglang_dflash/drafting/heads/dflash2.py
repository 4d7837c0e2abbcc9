"""The head of DFlash2 (z-lab): convolutions in the layers, and a walk over candidates.

Letters in shapes: R requests, B block positions, E hidden size, V tokens, N rows, K candidates or
taps, C groups of channels, r rank.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.heads.dflash2 import Convolution, DFlash2Config, Selector
from sglang_dflash.drafting.heads.head import Around, Finish
from sglang_dflash.drafting.heads.plain import HeadModule
from sglang_dflash.drafting.ops import Edges, TorchOps
from sglang_dflash.drafting.parallel import TensorParallel
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

    def check_cases(self, draw: RandomInputs, requests: int, block: int) -> Cases:
        config, head, cases = self.config, cast(DFlash2Config, self.config.head), Cases()
        if head.convolution is not None:
            taps, width = head.convolution.kernel_size, config.hidden_size
            x, bias = draw.floats(requests, block, width), draw.floats(width)
            base = draw.floats(taps, width)
            dynamic = draw.floats(requests, block, taps, width // head.convolution.group_size)
            cases["convolve"] = lambda ops: (ops.convolve(x, base, dynamic, bias),)
        return cases | super().check_cases(draw, requests, block)

    def edges(self, drafts: Tensor) -> Edges | None:
        weights = self.candidate_selector
        if weights is None:
            return None
        tables = weights.predecessor_codebook, weights.successor_codebook
        return Edges(weights.hidden_projection(drafts), *tables)


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
    `CandidateSelector` in SGLang's `srt/models/dflash.py` computes it for all pairs of candidates.
    A walk needs the row of the token that was taken only.

    Attributes:
        predecessor_codebook: A, `[V, r]`.
        successor_codebook: B, `[V, r]`.
        hidden_projection: `[E]` to `[r]`.
    """

    def __init__(self, width: int, vocab_size: int, config: Selector) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(width, config.rank, bias=False)
