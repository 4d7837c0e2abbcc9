"""Accept rules, as pure functions over the target's token at every position of a block.

Letters in shapes: R requests, W positions of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """The tokens that a verify step commits.

    Attributes:
        lengths: int64 `[R]`, committed tokens, 1 to W: the accepted drafts and the bonus token.
        tokens: int64 `[R, W]`, the committed tokens first; the rest is undefined.
        bonus: int64 `[R]`, the last committed token.
    """

    lengths: Tensor
    tokens: Tensor
    bonus: Tensor


def accept(block: Tensor, target_tokens: Tensor) -> Accepted:
    """Commit drafted tokens as long as they equal the target's, then the target's own next token.

    One rule for greedy and sampled requests. If `target_tokens` are the target's argmax, it is the
    greedy rule. If `target_tokens[i]` is drawn from p_target at position i, it is speculative
    sampling (Leviathan et al., arXiv 2211.17192) for a draft that proposes a point mass: a drafted
    token d is accepted with probability p_target(d), and after a rejection the bonus token has the
    distribution p_target without d, renormalized, which is the residual max(0, p_target - p_draft)
    of that paper. The output has the target's distribution, and with one fixed random number per
    position it is the same token. Tokens after drafts that were drawn are made by the ratio of
    probabilities (`noise`), and have that distribution, too.

    Args:
        block: int64 `[R, W]`, the bonus token of the last step, then the drafted tokens.
        target_tokens: int64 `[R, W]`, the target's token after each of them.
    """
    agree = (block[:, 1:] == target_tokens[:, :-1]).long().cumprod(1)
    accepted = agree.sum(1)
    return Accepted(accepted + 1, target_tokens, target_tokens.gather(1, accepted[:, None])[:, 0])


def simulate_acceptance(
    block: Tensor, target_tokens: Tensor, length: int, filler: int | None = None
) -> Accepted:
    """For timing only: commit `length` tokens (1 to W) of every block, fewer if there are fewer
    drafts. The output has no meaning.

    Args:
        block: int64 `[R, W]`; a negative draft means that there are none from there on.
        target_tokens: int64 `[R, W]`.
        length: tokens to commit.
        filler: a token id to commit in place of all; None commits the drafted tokens and, as the
            last one, the target's.
    """
    drafts = block[:, 1:length]
    lengths = 1 + (drafts >= 0).long().cumprod(1).sum(1)
    tokens = target_tokens.clone()
    tokens[:, : length - 1] = torch.where(drafts < 0, tokens[:, : length - 1], drafts)
    if filler is not None:
        tokens.fill_(filler)
    return Accepted(lengths, tokens, tokens.gather(1, lengths[:, None] - 1)[:, 0])
