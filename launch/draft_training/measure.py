"""Acceptance of a draft on held-out prompts, without decoding: the target has answered once, greedily,
and a walk over these answers takes the steps that decoding would take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.model import DraftModel

from .draft import Batch, block_hidden, edge_logits, gather
from .loops import loop_start
from .states import States

# Blocks that are drafted at a time.
BLOCKS = 48


@torch.inference_mode()
def acceptance(
    model: DraftModel, embed: Tensor, head: Tensor, states: States
) -> dict[str, float]:
    """Tokens per verify step outside of repetition loops, by kind: all tokens of the steps of all
    answers over the number of steps."""
    tokens: dict[str, int] = {}
    steps: dict[str, int] = {}
    for i, kind in enumerate(states.kinds):
        text, begin, end = states.answers[i].tolist()
        at = int(states.begins[text])
        stop = begin + loop_start(states.ids[at + begin : at + end].tolist())
        if stop - begin < 2:
            continue
        accepted = accepted_from(model, embed, head, states, i, begin, stop)
        place = begin
        while place + 1 < stop:
            count = min(accepted[place - begin] + 1, stop - 1 - place)
            tokens[kind] = tokens.get(kind, 0) + count
            steps[kind] = steps.get(kind, 0) + 1
            place += count
    return {kind: tokens[kind] / steps[kind] for kind in tokens}


def accepted_from(
    model: DraftModel, embed: Tensor, head: Tensor, states: States, i: int, begin: int, stop: int
) -> list[int]:
    """Drafted tokens that are right, of a block at every place from `begin` to `stop - 1`."""
    found: list[int] = []
    for places in torch.arange(begin, stop).split(BLOCKS):
        batch = gather([(states, i)], places[None])
        found += _right(model, embed, head, batch).tolist()
    return found


def _right(model: DraftModel, embed: Tensor, head: Tensor, batch: Batch) -> Tensor:
    """int64 `[A]`, of one text."""
    hidden = block_hidden(model, embed, batch)[0]
    at = batch.anchors[0, :, None] + torch.arange(1, model.config.block_size)
    text = F.pad(batch.ids[0], (0, model.config.block_size), value=-1)[at]
    if model.candidate_selector is None:
        drafted = F.linear(hidden.to(head.dtype), head).argmax(-1)
    else:
        drafted = _chosen(model, head, hidden, batch)
    return (drafted == text).long().cumprod(-1).sum(-1)


def _chosen(model: DraftModel, head: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
    """Tokens `[A, B - 1]` that the selector chooses one after another, of the likeliest ones."""
    selector, of = model.candidate_selector, model.config.selector
    assert selector is not None and of is not None
    logits = F.linear(hidden.to(head.dtype), head).float()
    before, found = batch.ids[0][batch.anchors[0]], []
    for k in range(hidden.shape[1]):
        best = logits[:, k].topk(of.top_k, dim=-1)
        query = selector.predecessor_codebook[before] * selector.hidden_projection(hidden[:, k])
        edges = torch.einsum("ar,anr->an", query, selector.successor_codebook[best.indices])
        chosen = (best.values + edges).argmax(-1, keepdim=True)
        before = best.indices.gather(1, chosen)[:, 0]
        found.append(before)
    return torch.stack(found, 1)
