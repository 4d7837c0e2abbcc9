"""Batches and loss of the draft's training, on the target's own texts (`states.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.heads.dflash2 import CandidateSelector, DFlash2Module
from sglang_dflash.drafting.model import DraftModel

from .device import send
from .states import States

# Later positions count less, because a token is used only if all before it are right
# (arXiv 2602.06036, section 4.3).
DECAY = 4.0
BATCH, ANCHORS = {"cpu": 8, "cuda": 32}, 64
# The most shards of a batch: a GPU gathers all answers of a shard at once.
SHARDS = 4
# Share of the loss that compares distributions; the rest is the cross entropy of the argmax.
SOFT = 0.5
# On a CPU the softmax is over the most frequent tokens of the text, the tokens that the target
# finds likely in the batch, and a random sample that stands for all others.
FREQUENT, OTHERS = 4096, 1024


@dataclass(frozen=True)
class Batch:
    """R texts up to an answer's end, padded to W tokens, and the anchors of their A blocks.

    Attributes:
        ids: int64 `[R, W]`; hidden: bfloat16 `[R, W, F E]`; likely, log_p: `[R, W, K]`. See
            `States`.
        ends: int64 `[R]`; anchors: int64 `[R, A]`.
    """

    ids: Tensor
    hidden: Tensor
    likely: Tensor
    log_p: Tensor
    ends: Tensor
    anchors: Tensor


def draw(shards: Sequence[States], rows: int, anchors: int, rng: random.Random) -> Batch:
    """Draw random answers from a few random shards, each with blocks at random places."""
    weights = [len(shard.answers) for shard in shards]
    few = rng.choices(shards, weights, k=min(rows, SHARDS))
    picked = [
        (shard, rng.randrange(len(shard.answers)))
        for shard in (few[row * len(few) // rows] for row in range(rows))
    ]
    # A block begins with a generated token after which another one follows.
    places = [
        sorted(rng.choices(range(begin, max(begin + 1, end - 1)), k=anchors))
        for begin, end in (shard.answers[i, 1:].tolist() for shard, i in picked)
    ]
    return gather(picked, torch.tensor(places))


def gather(picked: Sequence[tuple[States, int]], anchors: Tensor) -> Batch:
    """Gather the texts of answers, with blocks at `anchors` `[R, A]`. It is fastest if answers of
    the same shard are neighbors."""
    spans = []
    for shard, i in picked:
        text, _, end = shard.answers[i].tolist()
        spans.append((int(shard.begins[text]), end))
    width, device = max(end for _, end in spans), picked[0][0].ids.device
    # One copy to the device.
    numbers = send(torch.cat((torch.tensor(spans), anchors), 1), device)
    begins, ends = numbers[:, :1], numbers[:, 1:2]
    column = torch.arange(width, device=device)
    at, padding = begins + torch.minimum(column, ends - 1), column >= ends
    runs = [list(run) for _, run in groupby(range(len(picked)), lambda row: id(picked[row][0]))]

    def gather_column(name: str) -> Tensor:
        parts = [
            getattr(picked[run[0]][0], name).index_select(0, at[run[0] : run[-1] + 1].flatten())
            for run in runs
        ]
        joined = torch.cat(parts).unflatten(0, at.shape)
        return joined.masked_fill_(padding if joined.ndim == 2 else padding[..., None], 0)

    return Batch(
        gather_column("ids"),
        gather_column("hidden"),
        gather_column("likely").long(),
        gather_column("log_p").float(),
        ends[:, 0].contiguous(),
        numbers[:, 2:].contiguous(),
    )


def places_of(batch: Batch, block: int) -> tuple[Tensor, Tensor]:
    """Return positions of all drafted tokens `[R, A, B - 1]`, clamped to the text, and a mask of
    those that were inside."""
    at = batch.anchors[..., None] + torch.arange(1, block, device=batch.anchors.device)
    inside = at < batch.ends[:, None, None]
    return at.clamp_max(batch.ids.shape[1] - 1), inside


def labels_of(batch: Batch, block: int) -> tuple[Tensor, Tensor]:
    """Return the target's token at every drafted position, `[R, A, B - 1]`, and a mask of those
    that are known: after its first token that differs from the text, its greedy continuation is
    unknown."""
    at, inside = places_of(batch, block)
    labels = batch.likely[..., 0].gather(1, (at - 1).flatten(1)).view(at.shape)
    follows = (labels == batch.ids.gather(1, at.flatten(1)).view(at.shape)).long()
    is_known = torch.cat((torch.ones_like(follows[..., :1]), follows[..., :-1].cumprod(-1)), -1)
    return labels, is_known.bool() & inside


def masked_block_attention(context: Tensor, positions: Tensor, windows: Sequence[int]) -> Any:
    """Return an `attend` function for training on blocks `[R, A, B]`.

    A block sees the context before its anchor, as far back as the layer's window reaches, and all
    of its own tokens.

    `context`: `[R, W, L, 2, G, D]`; `positions`: `[R, A, B]`.
    """
    at = torch.arange(context.shape[1], device=context.device)
    before = at < positions[..., :1, None]  # [R, A, 1, W]
    unseen = [~(before & (at > positions[..., None] - window)) for window in windows]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_ctx, v_ctx = context[:, :, layer].unbind(2)  # [R, W, G, D]
        groups = q.shape[3] // k.shape[3]
        # [R, A, B, G, g, D]
        q = q.unflatten(3, (-1, groups)) * q.shape[-1] ** -0.5
        to_context = torch.einsum("rabhgd,rwhd->rhagbw", q, k_ctx).masked_fill(
            unseen[layer][:, None, :, None], float("-inf")
        )
        to_block = torch.einsum("rabhgd,rachd->rhagbc", q, k)
        p = torch.cat((to_context, to_block), dim=-1).softmax(-1).to(v.dtype)
        p_ctx, p_block = p.split((k_ctx.shape[1], q.shape[2]), dim=-1)
        out = torch.einsum("rhagbw,rwhd->rabhgd", p_ctx, v_ctx) + torch.einsum(
            "rhagbc,rachd->rabhgd", p_block, v
        )
        return out.flatten(3, 4)

    return attend


def block_hidden(model: DraftModel, embed: Tensor, batch: Batch) -> Tensor:
    """Hidden states `[R, A, B, E]` of blocks."""
    rows, width = batch.ids.shape
    block, device = model.config.block_size, batch.ids.device
    context = model.context_kv(batch.hidden, torch.arange(width, device=device).expand(rows, -1))
    blocks = torch.full((*batch.anchors.shape, block), model.config.mask_token_id, device=device)
    blocks[..., 0] = batch.ids.gather(1, batch.anchors)
    positions = batch.anchors[..., None] + torch.arange(block, device=device)
    windows = [layer.sliding_window or width for layer in model.config.layers]
    attend = masked_block_attention(context, positions, windows)
    return model(F.embedding(blocks, embed), positions, attend)


class Vocabulary:
    """The vocabulary of a step's softmax: on a GPU the whole one."""

    def __init__(self, size: int, shards: Sequence[States]) -> None:
        self.size, self.device = size, shards[0].ids.device
        counts = torch.zeros(size, dtype=torch.int64, device=self.device)
        for shard in shards:
            counts += torch.bincount(shard.ids, minlength=size)
        count = FREQUENT if self.device.type == "cpu" else size
        self.frequent = counts.argsort(descending=True)[:count]
        self.all = torch.arange(size, device=self.device)
        self.none_added = torch.zeros(size, device=self.device)

    def tokens(self, needed: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Return tokens int64 `[n]`, ascending, and a correction of each logit: a random token
        stands for all those that were left out."""
        if len(self.frequent) == self.size:
            return self.all, self.none_added
        is_taken = torch.zeros(self.size, dtype=torch.bool, device=self.device)
        is_taken[self.frequent] = True
        is_taken[needed.flatten()] = True
        others = torch.nonzero(~is_taken)[:, 0]
        added = torch.zeros(self.size, device=self.device)
        if len(others):
            order = torch.Generator().manual_seed(rng.getrandbits(60))
            picked = torch.randperm(len(others), generator=order)[:OTHERS]
            drawn = others[picked.to(self.device)]
            is_taken[drawn] = True
            added[drawn] = torch.tensor(len(others) / len(drawn)).log()
        tokens = torch.nonzero(is_taken)[:, 0]
        return tokens, added[tokens]


def edge_logits(
    selector: CandidateSelector, hidden: Tensor, before: Tensor, tokens: Tensor
) -> Tensor:
    """Return the selector's addition to the logits of `tokens` `[n]`, `[..., n]`, after the tokens
    `before` `[...]`."""
    query = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
    return query @ selector.successor_codebook[tokens].T


def block_loss(
    model: DraftModel,
    embed: Tensor,
    head: Tensor,
    vocabulary: Vocabulary,
    batch: Batch,
    rng: random.Random,
) -> tuple[Tensor, Tensor]:
    """Compute the loss with position weights exp(-(k - 1) / DECAY), and the mean acceptance length.

    Args:
        embed, head: the target's weights, `[V, E]`.

    Returns:
        Both float32 `[]` on the device; reading them waits for a GPU.
    """
    block = model.config.block_size
    labels, is_known = labels_of(batch, block)
    # Only known positions are computed. This is the only wait for a GPU, before its long work.
    rows = is_known.flatten().nonzero()[:, 0]

    def select_known(t: Tensor) -> Tensor:
        return t.flatten(0, 2).index_select(0, rows)

    hidden = select_known(block_hidden(model, embed, batch)[:, :, 1:])
    later = torch.arange(block - 1, device=hidden.device)
    weight = select_known(torch.exp(-later / DECAY).expand_as(is_known))
    weight = weight / weight.sum()
    at = (places_of(batch, block)[0] - 1).flatten(1)[..., None]
    soft = [t.gather(1, at.expand(-1, -1, t.shape[-1])) for t in (batch.likely, batch.log_p)]
    likely, log_p = (select_known(t.view(*is_known.shape, -1)) for t in soft)
    tokens, added = vocabulary.tokens(likely, rng)
    logits = F.linear(hidden, head[tokens], added.to(head.dtype))
    selector = model.head.candidate_selector if isinstance(model.head, DFlash2Module) else None
    if selector is not None:
        bonus = batch.ids.gather(1, batch.anchors)[..., None]
        before = select_known(torch.cat((bonus, labels[..., :-1]), -1))
        logits = logits + edge_logits(selector, hidden, before, tokens)
    log_q = F.log_softmax(logits, -1, dtype=torch.float32)
    of_likely = log_q.gather(1, torch.searchsorted(tokens, likely))
    share = SOFT * log_p.exp()
    share[:, 0] += 1 - SOFT
    loss = -((share * of_likely).sum(-1) * weight).sum()
    with torch.no_grad():
        right = torch.zeros_like(is_known).flatten()
        right[rows] = of_likely[:, 0] >= log_q.amax(-1)
        accepted = right.view_as(is_known).long().cumprod(-1).sum(-1)
    return loss, 1 + accepted.float().mean()
