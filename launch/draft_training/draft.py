"""The draft: it learns from the target's continuations (`continuations.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.selector import CandidateSelector
from sglang_dflash.facts.tensors import layout

from . import data
from .continuations import Shard
from .loop import train

BLOCK_SIZE = 8
# Later positions count less, because a token is used only if all before it are right
# (arXiv 2602.06036, section 4.3).
DECAY = 4.0
# The layers whose outputs the draft reads, spread as in published drafts.
TARGET_LAYERS = (1, 4, 6)
BATCH, ANCHORS = 12, 28
LR = 6e-3
# Of the DFlash2 draft, which starts from the v1 draft: a lower rate, and a higher one for tables
# that begin at zero.
LR2, CODEBOOKS = 2e-3, 2.0
DFLASH2 = {
    "selector_rank": 64, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16,
}  # fmt: skip
# Share of the loss that compares distributions; the rest is the cross entropy of the argmax.
SOFT = 0.5


def dflash2_config(first: dict[str, Any]) -> dict[str, Any]:
    """config.json of the DFlash2 draft, by that of the v1 draft."""
    own = {**first["dflash_config"], **DFLASH2}
    return {**first, "architectures": ["DFlash2DraftModel"], "dflash_config": own}


def draft_config(target: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of the v1 draft, in the published layout. Its layers are as wide as the target's,
    which they start from."""
    of = target.config
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": of.hidden_size,
        "intermediate_size": of.intermediate_size,
        "num_hidden_layers": 3,
        "num_attention_heads": of.num_attention_heads,
        "num_key_value_heads": of.num_key_value_heads,
        "head_dim": of.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": of.max_position_embeddings,
        "vocab_size": of.vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "num_target_layers": of.num_hidden_layers,
        "dflash_config": {
            "mask_token_id": tokenizer.token_to_id(data.MASK),
            "target_layer_ids": list(TARGET_LAYERS),
        },
    }


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


def masked_block_attention(context: Tensor, anchors: Tensor) -> Any:
    """`attend` for training, of blocks `[R, A, B]`.

    A block sees the context before its anchor, and all of its own tokens.

    `context`: `[R, W, L, 2, G, D]`; `anchors`: `[R, A]`, the position of each block's first token.
    """
    seen = torch.arange(context.shape[1]) < anchors[..., None]  # [R, A, W]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_ctx, v_ctx = context[:, :, layer].unbind(2)  # [R, W, G, D]
        groups = q.shape[3] // k.shape[3]
        # [R, A, B, G, g, D]
        q = q.unflatten(3, (-1, groups)) * q.shape[-1] ** -0.5
        to_context = torch.einsum("rabhgd,rwhd->rhagbw", q, k_ctx).masked_fill(
            ~seen[:, None, :, None, None], float("-inf")
        )
        to_block = torch.einsum("rabhgd,rachd->rhagbc", q, k)
        p = torch.cat((to_context, to_block), dim=-1).softmax(-1)
        p_ctx, p_block = p.split((k_ctx.shape[1], BLOCK_SIZE), dim=-1)
        out = torch.einsum("rhagbw,rwhd->rabhgd", p_ctx, v_ctx) + torch.einsum(
            "rhagbc,rachd->rabhgd", p_block, v
        )
        return out.flatten(3, 4)

    return attend


def block_logits(
    model: DraftModel, embed: Tensor, target_hidden: Tensor, ids: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states `[R, A, B - 1, E]` and logits `[R, A, B - 1, V]` of blocks that start at
    `anchors` `[R, A]` of `ids` `[R, W]`."""
    rows, width = ids.shape
    context = model.context_kv(target_hidden, torch.arange(width).expand(rows, -1))
    blocks = torch.full((*anchors.shape, BLOCK_SIZE), model.config.mask_token_id)
    blocks[..., 0] = ids.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(BLOCK_SIZE)
    attend = masked_block_attention(context, anchors)
    hidden = model(F.embedding(blocks, embed), positions, attend)[:, :, 1:]
    return hidden, hidden @ embed.T


def edge_logits(selector: CandidateSelector, hidden: Tensor, before: Tensor) -> Tensor:
    """What the selector adds to the logits of all tokens `[R, A, B - 1, V]`, after the tokens
    `before` `[R, A, B - 1]`."""
    query = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
    return query @ selector.successor_codebook.T


def block_loss(model: DraftModel, embed: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """The loss with position weights exp(-(k - 1) / DECAY), and the mean acceptance length."""
    width = model.config.target_hidden_width
    hidden, logits = block_logits(model, embed, batch.hidden[..., :width], batch.ids, batch.anchors)
    labels, known = labels_of(batch)
    if model.candidate_selector is not None:
        bonus = batch.ids.gather(1, batch.anchors)[..., None]
        before = torch.cat((bonus, labels[..., :-1]), -1)
        logits = logits + edge_logits(model.candidate_selector, hidden, before)
    weight = known * torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)
    weight, log_q = weight / weight.sum(), logits.log_softmax(-1)
    hard = -log_q.gather(-1, labels[..., None])[..., 0]
    at = batch.anchors[..., None] + torch.arange(BLOCK_SIZE - 1)
    at = at.clamp_max(batch.ids.shape[1] - 1).flatten(1)[..., None]
    final = batch.hidden[..., width:]
    final = final.gather(1, at.expand(-1, -1, final.shape[-1])).view(*labels.shape, -1)
    soft = -(log_q * (final @ embed.T).softmax(-1)).sum(-1)
    loss = (((1 - SOFT) * hard + SOFT * soft) * weight).sum()
    accepted = ((logits.argmax(-1) == labels) & known).long().cumprod(-1).sum(-1)
    return loss, 1 + accepted.float().mean().item()


def train_draft(
    model: DraftModel, embed: Tensor, shards: Sequence[Shard], work: Path, steps: int
) -> None:
    """Train `model` in place; an interrupted run resumes."""

    def loss_of(rng: random.Random) -> tuple[Tensor, dict[str, float]]:
        loss, acceptance = block_loss(model, embed, draw(shards, BATCH, ANCHORS, rng))
        return loss, {"acceptance": acceptance}

    is_second = model.candidate_selector is not None
    name, lr = ("dflash2", LR2) if is_second else ("draft", LR)
    train(name, model, loss_of, steps=steps, lr=lr, work=work, codebooks=CODEBOOKS)


def init_from_draft(model: DraftModel, first: DraftModel) -> None:
    """Start a DFlash2 draft as the v1 draft that it computes the same as."""
    model.load_state_dict(first.state_dict(), strict=False)
    selector = model.candidate_selector
    assert selector is not None
    with torch.no_grad():
        selector.predecessor_codebook.normal_(0, 0.3)
        selector.hidden_projection.weight.normal_(0, 0.05)
        for layer in model.layers:
            for convolution in (layer.attention_conv, layer.mlp_conv):
                convolution.kernel_projection.weight.zero_()


def init_from_target(model: DraftModel, target: PreTrainedModel) -> None:
    """Copy the target's last layers into the draft's, and pass its last feature through `fc`."""
    weights, parts = target.model.state_dict(), layout(model.config)
    before = target.config.num_hidden_layers - len(model.layers)
    for i, layer in enumerate(model.layers):
        own, of = f"layers.{i}.", f"layers.{before + i}."
        state = {
            name: torch.cat([weights[part.name.replace(own, of)] for part in parts[own + name]])
            for name in layer.state_dict()
        }
        layer.load_state_dict(state)
    width = model.config.hidden_size
    with torch.no_grad():
        model.fc.weight.normal_(0, 0.02)
        model.fc.weight[:, -width:] += torch.eye(width)
