"""Acceptance of a draft on held-out prompts, without decoding: the target has answered once,
greedily, and a walk over these answers takes the steps that decoding would take."""

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
    """Tokens per verify step outside of repetition loops, by kind: all tokens of the steps of all
    answers over the number of steps."""
    tokens, steps = Counter[str](), Counter[str]()
    for i, (kind, answer) in enumerate(zip(states.kinds, states.answers.tolist(), strict=True)):
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
            tokens[kind] += count
            steps[kind] += 1
            place += count
    return {kind: tokens[kind] / steps[kind] for kind in tokens}


def _right(
    model: DraftModel, embed: Tensor, head: Tensor, states: States, i: int, places: Tensor
) -> list[int]:
    """Drafted tokens that are right, of blocks that begin at `places` `[A]` of an answer."""
    batch = gather([(states, i)], places[None])
    places = batch.anchors[0]
    hidden, bonus = block_hidden(model, embed, batch)[0], batch.ids[0][places]
    target = TargetHead(partial(F.embedding, weight=embed), partial(F.linear, weight=head))
    drafted = model.make_head(target)(hidden, bonus, None)
    block = model.config.block_size
    at = places[:, None] + torch.arange(1, block, device=places.device)
    text = F.pad(batch.ids[0], (0, block), value=-1)[at]
    return (drafted == text).long().cumprod(-1).sum(-1).tolist()
