"""The target's distribution of a sampled token, written down once more: what tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def target_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """p_target `[..., V]` in float32 from logits `[..., V]`: temperature, then top-k, top-p and
    min-p as serving engines apply them.

    `top_k` 0 keeps all. Top-p keeps the smallest set of likeliest tokens whose mass reaches it.
    Min-p drops tokens below `min_p` times the likeliest token's probability.
    """
    p = (logits.float() / temperature).softmax(-1)
    ordered, order = p.sort(dim=-1, descending=True)
    drop = (ordered.cumsum(-1) - ordered > top_p) | (ordered < min_p * ordered[..., :1])
    if top_k:
        drop[..., top_k:] = True
    p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(drop, 0.0))
    return p / p.sum(-1, keepdim=True)
