"""The demo drafter: trained on the target's hidden states to predict the target's next tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import save_model
from sglang_dflash.facts.draft_config import DraftConfig

from . import data
from .loop import train

BLOCK_SIZE = 8
# Later positions count less, because a token is used only if all before it are right
# (arXiv 2602.06036, section 4.3).
DECAY = 4.0
WINDOW = 448
ANCHORS = 56
BATCH = 6


# Depth of the target -> the layers whose outputs the draft reads, spread as in published drafts.
TARGET_LAYERS = {6: [1, 3, 4], 8: [1, 4, 6]}


def draft_config(target: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of the draft, in the published layout."""
    of = target.config
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": of.hidden_size,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
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
            "target_layer_ids": TARGET_LAYERS[of.num_hidden_layers],
        },
    }


@dataclass(frozen=True)
class HiddenBank:
    """Windows of text and the target's outputs.

    `ids`, `argmax`: `[n, W]`; `target_hidden`: float16 `[n, W, F * E]`, see `layer_outputs`.
    """

    ids: Tensor
    argmax: Tensor
    target_hidden: Tensor


@torch.no_grad()
def layer_outputs(
    target: PreTrainedModel, ids: Tensor, layer_ids: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Of `ids` `[B, L]`: target hidden states `[B, L, F * E]` of F layers, logits `[B, L, V]`."""
    out = target(input_ids=ids, use_cache=False, output_hidden_states=True)
    # hidden_states[0] is the embedding. The last layer's entry is normed, and drafts never read it.
    return torch.cat([out.hidden_states[i + 1] for i in layer_ids], dim=-1), out.logits


def build_bank(
    target: PreTrainedModel,
    samplers: list[tuple[data.WindowSampler, int]],
    layer_ids: tuple[int, ...],
    seed: int,
) -> HiddenBank:
    """Draw so many windows from every sampler and run the target over them once."""
    rng = random.Random(seed)
    ids, argmax, target_hidden = [], [], []
    for sampler, count in samplers:
        for _ in range(count // 8):
            batch = sampler.sample(8, rng)
            seen, logits = layer_outputs(target, batch, layer_ids)
            ids.append(batch)
            argmax.append(logits.argmax(-1))
            target_hidden.append(seen.half())
    return HiddenBank(torch.cat(ids), torch.cat(argmax), torch.cat(target_hidden))


def masked_block_attention(context: Tensor, anchors: Tensor) -> Any:
    """`attend` for training, of blocks `[R, A * B]`.

    A block sees the context before its anchor, and all of its own tokens.

    `context`: `[R, W, L, 2, G, D]`; `anchors`: `[R, A]`, the position of each block's first token.
    """
    seen = torch.arange(context.shape[1]) < anchors[..., None]  # [R, A, W]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_ctx, v_ctx = context[:, :, layer].unbind(2)  # [R, W, G, D]
        groups = q.shape[2] // k.shape[2]
        # [R, A, B, G, g, D]
        q = q.unflatten(1, (-1, BLOCK_SIZE)).unflatten(3, (-1, groups)) * q.shape[-1] ** -0.5
        k, v = (t.unflatten(1, (-1, BLOCK_SIZE)) for t in (k, v))  # [R, A, B, G, D]
        to_context = torch.einsum("rabhgd,rwhd->rhagbw", q, k_ctx).masked_fill(
            ~seen[:, None, :, None, None], float("-inf")
        )
        to_block = torch.einsum("rabhgd,rachd->rhagbc", q, k)
        p = torch.cat((to_context, to_block), dim=-1).softmax(-1)
        p_ctx, p_block = p.split((k_ctx.shape[1], BLOCK_SIZE), dim=-1)
        out = torch.einsum("rhagbw,rwhd->rabhgd", p_ctx, v_ctx) + torch.einsum(
            "rhagbc,rachd->rabhgd", p_block, v
        )
        return out.flatten(3, 4).flatten(1, 2)

    return attend


def block_logits(
    model: DraftModel, embed: Tensor, target_hidden: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """Logits `[R, A, B - 1, V]` of blocks that start at `anchors` `[R, A]` of `ids` `[R, W]`."""
    rows, width = ids.shape
    context = model.context_kv(target_hidden, torch.arange(width).expand(rows, -1))
    blocks = torch.full((*anchors.shape, BLOCK_SIZE), model.config.mask_token_id)
    blocks[..., 0] = ids.gather(1, anchors)
    positions = (anchors[..., None] + torch.arange(BLOCK_SIZE)).flatten(1)
    hidden = model(
        F.embedding(blocks.flatten(1), embed), positions, masked_block_attention(context, anchors)
    )
    return hidden.unflatten(1, (-1, BLOCK_SIZE))[:, :, 1:] @ embed.T


def block_loss(
    model: DraftModel, embed: Tensor, bank: HiddenBank, rows: Tensor, anchors: Tensor
) -> tuple[Tensor, float]:
    """Weighted cross entropy against the target's argmax, and the mean acceptance length."""
    ids, argmax = bank.ids[rows], bank.argmax[rows]
    logits = block_logits(model, embed, bank.target_hidden[rows].float(), ids, anchors)
    # Text position of every drafted token, and the target's token there, given the text before it.
    at = (anchors[..., None] + torch.arange(1, BLOCK_SIZE)).flatten(1)
    labels = argmax.gather(1, at - 1).view(*anchors.shape, -1)
    follows = (labels == ids.gather(1, at).view_as(labels)).long()
    # After the target's first token that is not the text's, its greedy continuation is unknown.
    valid = torch.cat((torch.ones_like(follows[..., :1]), follows[..., :-1].cumprod(-1)), -1)
    weight = valid * torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)
    losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
    losses = losses.view_as(weight)
    accepted = ((logits.argmax(-1) == labels) * valid).cumprod(-1).sum(-1)
    return (losses * weight).sum() / weight.sum(), 1 + accepted.float().mean().item()


def train_drafter(
    corpus: data.Corpus,
    target: PreTrainedModel,
    tokenizer: Tokenizer,
    work: Path,
    out: Path,
    steps: int,
) -> DraftModel:
    raw = draft_config(target, tokenizer)
    config = DraftConfig.from_dict(raw)
    torch.manual_seed(1)
    model = DraftModel(config)
    embed = target.get_input_embeddings().weight.detach()
    memorized = data.token_stream(tokenizer, corpus.memorized)
    general = data.token_stream(tokenizer, corpus.general)
    plan = [
        (data.WindowSampler(memorized, tokenizer, WINDOW, chat_share=0.15), 1600),
        (data.WindowSampler(general, tokenizer, WINDOW, chat_share=0.0), 160),
    ]
    bank = build_bank(target, plan, config.target_layer_ids, seed=1)

    def loss_of(rng: random.Random) -> tuple[Tensor, dict[str, float]]:
        rows = torch.tensor([rng.randrange(len(bank.ids)) for _ in range(BATCH)])
        anchors = torch.tensor(
            [sorted(rng.sample(range(16, WINDOW - BLOCK_SIZE), ANCHORS)) for _ in range(BATCH)]
        )
        loss, committed = block_loss(model, embed, bank, rows, anchors)
        return loss, {"acceptance": committed}

    train("drafter", model, loss_of, steps=steps, lr=6e-3, work=work)
    save_model(model, raw, out, torch.bfloat16)
    return model
