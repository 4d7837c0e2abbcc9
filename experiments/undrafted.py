"""A width policy that never drafts: what our worker costs beside plain decoding, without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from sglang_dflash.drafting.width import FixedWidth
from sglang_dflash.serving.step.extension import Extension


class NeverDrafts(FixedWidth):
    """Width 1 in every step; the draft KV cache is kept up nonetheless."""

    drafts = False

    def __init__(self, block_size: int) -> None:
        self.widths = (1, block_size)
        self._steps: Counter[int] = Counter()

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        self._steps[1] += 1
        return 1

    def report(self) -> Mapping[str, Any]:
        return {"width_steps": {str(width): self._steps[width] for width in self.widths}}


def extension(_target_worker: Any) -> Extension:
    """For `--speculative-dflash-extension experiments.undrafted:extension`."""
    return Extension(width_policy=NeverDrafts)
