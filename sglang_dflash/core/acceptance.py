"""Accept rules, as pure functions over what the target says at every position of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """What a verify step commits.

    `lengths` int64 `[R]`: committed tokens, 1 to B: the accepted drafts and the bonus token.
    `tokens` int64 `[R, B]`: the committed ones first; the rest is of no meaning.
    `bonus` int64 `[R]`: the last committed token.
    """

    lengths: Tensor
    tokens: Tensor
    bonus: Tensor


def accept(block: Tensor, target_tokens: Tensor) -> Accepted:
    """Commit the drafted tokens for as long as they are what the target itself says, then the target's own next token.

    One rule for greedy and sampled requests. With `target_tokens` the target's argmax it is the greedy rule. With
    `target_tokens[i]` drawn from p_target at position i it is speculative sampling (Leviathan et al., arXiv 2211.17192) for a
    draft that proposes a point mass: a drafted token d is accepted with probability p_target(d), and given a rejection the
    bonus is distributed as p_target without d, renormalised - the residual max(0, p_target - p_draft) of that paper. So the
    output is distributed as the target's, and for a fixed random draw per position it is the very same token.

    Args:
        block: int64 `[R, B]`, the bonus token of the last step, then the drafted tokens.
        target_tokens: int64 `[R, B]`, what the target says after each of them.
    """
    agree = (block[:, 1:] == target_tokens[:, :-1]).long().cumprod(1)
    accepted = agree.sum(1)
    return Accepted(accepted + 1, target_tokens, target_tokens.gather(1, accepted[:, None])[:, 0])


def accept_by_decree(
    block: Tensor, target_tokens: Tensor, length: int, filler: int | None = None
) -> Accepted:
    """For timing alone: commit `length` tokens (1 to B) of every block whatever the target says; the output means nothing.

    Args:
        block, target_tokens: as for `accept`; a negative draft stands for none, and the target's token is taken.
        filler: a token id that stands in for all committed ones, None for the drafted ones and the target's own as the last.
    """
    tokens = target_tokens.clone()
    drafts = block[:, 1:length]
    tokens[:, : length - 1] = torch.where(drafts < 0, tokens[:, : length - 1], drafts)
    if filler is not None:
        tokens.fill_(filler)
    return Accepted(torch.full_like(block[:, 0], length), tokens, tokens[:, length - 1])


def target_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """p_target `[..., V]` in float32 from logits `[..., V]`: temperature, then top-k, top-p and min-p as serving engines do.

    `top_k` 0 keeps all; top-p keeps the smallest set of likeliest tokens whose mass reaches it; min-p drops tokens below
    `min_p` times the likeliest one's probability.
    """
    p = (logits.float() / temperature).softmax(-1)
    ordered, order = p.sort(dim=-1, descending=True)
    drop = (ordered.cumsum(-1) - ordered > top_p) | (ordered < min_p * ordered[..., :1])
    if top_k:
        drop[..., top_k:] = True
    p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(drop, 0.0))
    return p / p.sum(-1, keepdim=True)


def sample(p_target: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token per row of p_target `[R, B, V]`: int64 `[R, B]`."""
    return torch.multinomial(p_target.flatten(0, -2), 1, generator=generator).view(
        p_target.shape[:-1]
    )
