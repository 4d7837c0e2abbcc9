"""The `code` pair's draft: it learns from the target's continuations (`continuations.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.model import DraftModel

from .continuations import Shard
from .drafter import BLOCK_SIZE, DECAY, block_logits
from .loop import train

BATCH, ANCHORS = 12, 28
LR = 6e-3
# Share of the loss that compares distributions; the rest is the cross entropy of the argmax.
SOFT = 0.5


@dataclass(frozen=True)
class Batch:
    """Windows of several shards, and where their blocks begin.

    Attributes:
        ids, argmax: int64 `[R, W]`; hidden: float32 `[R, W, (F + 1) E]`. See `Shard`.
        ends: int64 `[R]`; anchors: int64 `[R, A]`.
    """

    ids: Tensor
    argmax: Tensor
    hidden: Tensor
    ends: Tensor
    anchors: Tensor


def draw(shards: Sequence[Shard], rows: int, anchors: int, rng: random.Random) -> Batch:
    """Random windows, each with blocks at random places of what the target wrote."""
    which = [rng.choice(shards) for _ in range(rows)]
    picked = [(shard, rng.randrange(len(shard.ends))) for shard in which]
    places = []
    for shard, row in picked:
        # The first generated token is the first that a block can begin with; one must follow.
        room = range(shard.begin, int(shard.ends[row]) - 1)
        places.append(sorted(rng.choices(room, k=anchors)))
    return Batch(
        torch.stack([shard.ids[row] for shard, row in picked]),
        torch.stack([shard.argmax[row] for shard, row in picked]),
        torch.stack([shard.hidden[row] for shard, row in picked]).float(),
        torch.stack([shard.ends[row] for shard, row in picked]),
        torch.tensor(places),
    )


def labels_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The target's token at every drafted position, `[R, A, B - 1]`, and whether it is known.

    After the target's first token that is not the text's, its greedy continuation is unknown.
    """
    at = batch.anchors[..., None] + torch.arange(1, BLOCK_SIZE)
    inside = at < batch.ends[:, None, None]
    at = at.clamp_max(batch.ids.shape[1] - 1).flatten(1)
    labels = batch.argmax.gather(1, at - 1).view(inside.shape)
    follows = (labels == batch.ids.gather(1, at).view(inside.shape)).long()
    known = torch.cat((torch.ones_like(follows[..., :1]), follows[..., :-1].cumprod(-1)), -1)
    return labels, known.bool() & inside


def block_loss(
    model: DraftModel, embed: Tensor, batch: Batch, soft: float = SOFT
) -> tuple[Tensor, float]:
    """The loss with position weights exp(-(k - 1) / DECAY), and the mean acceptance length."""
    width = model.config.target_hidden_width
    logits = block_logits(model, embed, batch.hidden[..., :width], batch.ids, batch.anchors)
    labels, known = labels_of(batch)
    weight = known * torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)
    weight, log_q = weight / weight.sum(), logits.log_softmax(-1)
    hard = -log_q.gather(-1, labels[..., None])[..., 0]
    loss = (hard * weight).sum()
    if soft:
        at = batch.anchors[..., None] + torch.arange(BLOCK_SIZE - 1)
        at = at.clamp_max(batch.ids.shape[1] - 1).flatten(1)[..., None]
        final = batch.hidden[..., width:]
        final = final.gather(1, at.expand(-1, -1, final.shape[-1])).view(*labels.shape, -1)
        p = (final @ embed.T).softmax(-1)
        loss = (1 - soft) * loss - soft * ((p * log_q).sum(-1) * weight).sum()
    accepted = ((logits.argmax(-1) == labels) & known).long().cumprod(-1).sum(-1)
    return loss, 1 + accepted.float().mean().item()


@torch.no_grad()
def committed(model: DraftModel, embed: Tensor, shard: Shard, row: int) -> list[int]:
    """Tokens per verify step of greedy decoding, if the draft had served this greedy text."""
    width, end = model.config.target_hidden_width, int(shard.ends[row])
    anchors = torch.arange(shard.begin, end - 1)[None]
    hidden = shard.hidden[row : row + 1, :, :width].float()
    ids = shard.ids[row : row + 1]
    drafts = block_logits(model, embed, hidden, ids, anchors)[0].argmax(-1)
    steps, at = [], shard.begin
    while at < end - 1:
        truth = ids[0, at + 1 : min(at + BLOCK_SIZE, end)]
        right = (drafts[at - shard.begin, : len(truth)] == truth).long().cumprod(0).sum()
        steps.append(int(right) + 1)
        at += steps[-1]
    return steps


def train_draft(
    model: DraftModel, embed: Tensor, shards: Sequence[Shard], work: Path, steps: int
) -> DraftModel:
    """Train `model` in place; an interrupted run resumes."""

    def loss_of(rng: random.Random) -> tuple[Tensor, dict[str, float]]:
        loss, acceptance = block_loss(model, embed, draw(shards, BATCH, ANCHORS, rng))
        return loss, {"acceptance": acceptance}

    train("draft", model, loss_of, steps=steps, lr=LR, work=work)
    return model


def init_from_target(model: DraftModel, layers: Sequence[Any]) -> None:
    """Copy the target's last layers into the draft's, and pass its last feature through `fc`."""
    count = len(model.layers)
    for own, of in zip(model.layers, layers[-count:], strict=True):
        own.load_state_dict(of.state_dict())
    width = model.config.hidden_size
    with torch.no_grad():
        model.fc.weight.normal_(0, 0.02)
        model.fc.weight[:, -width:] += torch.eye(width)
