"""A width policy that draws every step's width, another one in every process.

`by_width` also gives the target an attention backend for each width, as on a GPU, so that width 1
is a verification, too.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang_dflash.drafting.width import FixedWidth
from sglang_dflash.serving.start import build
from sglang_dflash.serving.step.extension import Extension
from sglang_dflash.serving.step.target_forward import TargetForwardByWidth
from tests.engine import oracle


class RandomWidth(FixedWidth):
    """Widths 1, 4 and the block size, with runs of plain decoding."""

    def __init__(self, block_size: int) -> None:
        self.widths = (1, 4, block_size)
        self._random = random.Random(os.getpid())
        self._plain = 0
        self._steps: Counter[int] = Counter()

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        if self._plain == 0 and self._random.random() < 0.05:
            # Longer than hidden states wait.
            self._plain = self._random.choice((3, 20))
        self._plain = max(0, self._plain - 1)
        width = 1 if self._plain else self._random.choice(self.widths)
        self._steps[width] += 1
        return width

    def report(self) -> Mapping[str, Any]:
        return {"width_steps": {str(width): self._steps[width] for width in self.widths}}


def with_oracle(target_worker: Any) -> Extension:
    """Random widths of the oracle's drafts."""
    return replace(oracle.extension(target_worker), width_policy=RandomWidth)


def extension(_target_worker: Any) -> Extension:
    return Extension(width_policy=RandomWidth)


def by_width(_target_worker: Any) -> Extension:
    def made(target_worker: Any, widths: Sequence[int], _device: Any) -> TargetForwardByWidth:
        return TargetForwardByWidth(target_worker, widths)

    # A process of SGLang's own has one worker.
    build.target_forward = made
    return Extension(width_policy=RandomWidth)
