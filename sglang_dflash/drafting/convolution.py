"""The grouped dynamic convolution of DFlash2 drafts, around attention and MLP of each layer.

It mixes neighboring positions of a block; context K/V does not pass through it. From z-lab's
DFlash2 (`conv_kernel_size`, `conv_group_size`); `DFlashGroupedConv` in SGLang's
`srt/models/dflash.py` computes the same.

Letters in shapes: R requests, B block positions, E hidden size, K taps, C groups of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.facts.dflash2 import Convolution

# (output of the sublayer, bias to add to it) -> the same, or convolved with the bias added.
Finish = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class Around(Protocol):
    """What a layer does around a sublayer: to its input, and then to its output."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish]:
        """The sublayer's input `[..., B, E]`, and what makes its output of the sublayer's."""


class Unchanged(nn.Module):
    """Around a sublayer of DFlash v1: nothing."""

    def forward(self, x: Tensor) -> tuple[Tensor, Finish]:
        return x, lambda out, bias: (out, bias)


class GroupedConvolution(nn.Module):
    """Each position gets a weighted sum of itself and the K - 1 positions before it in its block.

    The weights of a channel are a learned kernel plus one that is projected from the input, which
    all channels of a group share. The same projection gives the kernel for the output.
    """

    def __init__(self, width: int, of: Convolution, ops: TorchOps) -> None:
        super().__init__()
        self.ops, self.taps, self.groups = ops, of.kernel_size, width // of.group_size
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
