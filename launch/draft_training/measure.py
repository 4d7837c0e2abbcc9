"""Acceptance of a draft on held-out prompts, without decoding.

The target has answered greedily once. A walk over its answers takes the steps of decoding.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.model import DraftModel

from .draft import block_hidden, gather
from .loops import loop_start
from .states import States

# Blocks that are drafted at a time.
BLOCKS = {"cpu": 48, "cuda": 512}


@torch.inference_mode()
def acceptance(model: DraftModel, embed: Tensor, head: Tensor, states: States) -> dict[str, float]:
    """Return the tokens per verify step of all answers, by their `kinds`, repetition loops left
    out."""
    tokens, steps = Counter[str](), Counter[str]()
    for i, (source, answer) in enumerate(zip(states.kinds, states.answers.tolist(), strict=True)):
        text, begin, end = answer
        at = int(states.begins[text])
        stop = begin + loop_start(states.ids[at + begin : at + end].tolist())
        if stop - begin < 2:
            continue
        accepted = [
            count
            for places in torch.arange(begin, stop).split(BLOCKS[embed.device.type])
            for count in _right(model, embed, head, states, i, places)
        ]
        place = begin
        while place + 1 < stop:
            count = min(accepted[place - begin] + 1, stop - 1 - place)
            tokens[source] += count
            steps[source] += 1
            place += count
    return {source: tokens[source] / steps[source] for source in tokens}


def _right(
    model: DraftModel, embed: Tensor, head: Tensor, states: States, i: int, places: Tensor
) -> list[int]:
    """Return the number of right drafts of each block that begins at `places` `[A]` of an
    answer."""
    batch = gather([(states, i)], places[None])
    places = batch.anchors[0]
    hidden, bonus = block_hidden(model, embed, batch)[0], batch.ids[0][places]
    target = TargetHead(partial(F.embedding, weight=embed), partial(F.linear, weight=head))
    drafted = model.make_head(target)(hidden, bonus, None)
    block = model.config.block_size
    at = places[:, None] + torch.arange(1, block, device=places.device)
    text = F.pad(batch.ids[0], (0, block), value=-1)[at]
    return (drafted == text).long().cumprod(-1).sum(-1).tolist()
