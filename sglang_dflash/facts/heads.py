"""What a draft has beyond DFlash v1, in bytes of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.tensors import expected_tensors


class HeadBytes(NamedTuple):
    """What a proposal reads beyond that of a v1 draft with the same layers.

    Attributes:
        once: weights of convolutions and of the selector's projection.
        per_request: rows of the selector's tables, one of each token before and of each candidate.
    """

    once: int
    per_request: int


def head_bytes(config: DraftConfig, block_size: int, itemsize: int) -> HeadBytes:
    """Of a rank: each holds all of these weights.

    Args:
        block_size: B, tokens of a block.
        itemsize: bytes of a weight.
    """
    of_v1 = expected_tensors(replace(config, convolution=None, selector=None))
    own = {name: shape for name, shape in expected_tensors(config).items() if name not in of_v1}
    tables = {name for name in own if name.endswith("_codebook")}
    once = sum(math.prod(own[name]) for name in own.keys() - tables)
    rows = 0 if config.selector is None else 1 + config.selector.top_k
    rank = 0 if config.selector is None else config.selector.rank
    return HeadBytes(itemsize * once, itemsize * (block_size - 1) * rows * rank)
