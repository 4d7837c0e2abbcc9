"""The target's tokens of sampled requests.

Letters in shapes: R requests; W positions of a step; P drafts of a block; N = R W; K candidates; V
tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES
from sglang_dflash.drafting.noise import (
    ACCEPTING,
    LEAST_LEFT,
    REDRAWING,
    BlockNoise,
    Proposal,
    SampleFilters,
    gumbel,
    uniform,
)

# Logits that samples are drawn from at a time.
ELEMENTS = 1 << 23


def sample(
    logits: Tensor,
    noise: BlockNoise,
    filters: SampleFilters | None,
    proposal: Proposal | None = None,
) -> Tensor:
    """Sample a token of each row: the one with the largest logit / temperature + noise of those
    that the filters keep.

    After a draft that was drawn from q, it is the draft with probability min(1, p / q), and else
    another token of max(0, p - q), see `noise`. Behind that, no token of the request is used, and a
    kernel may return any ids of tokens. Where a request's filters keep `MOST_CANDIDATES` tokens or
    more, but not all, and `top_ks` more than these, a kernel does not know p, and how the draft was
    made does not matter.

    Args:
        logits: `[N, V]`, of the positions of each request, N = R W.
        noise: of the rows. A request without noise has a `top_ks` of 1.
        filters: of the requests; None if they leave nothing out. What they keep of a row depends on
            probabilities among all V tokens, in the order of their logits, and of equal ones of
            their ids.
        proposal: None if no draft was drawn.

    Returns:
        int64 `[N]`.
    """
    width = len(logits) // len(noise.seeds)
    by_request = logits.unflatten(0, (-1, width))
    # The noise of a whole batch is gigabytes.
    count = max(1, ELEMENTS // (width * logits.shape[1]))
    pieces = (slice(first, first + count) for first in range(0, len(noise.seeds), count))
    return torch.cat(
        [
            _of_requests(by_request[piece], *(_rows(x, piece) for x in (noise, filters, proposal)))
            for piece in pieces
        ]
    )


def _rows(values: Any, piece: slice) -> Any:
    """Some requests' part of a NamedTuple of tensors; None of None."""
    return None if values is None else type(values)(*(value[piece] for value in values))


def _of_requests(
    logits: Tensor, noise: BlockNoise, filters: SampleFilters | None, proposal: Proposal | None
) -> Tensor:
    """The samples int64 `[N]` of logits `[R, W, V]`."""
    temperatures, device = noise.temperatures[:, None, None], logits.device
    scaled, is_known = logits.float() / temperatures, torch.ones_like(logits[..., 0]).bool()
    scaled = scaled.where(temperatures > 0, logits.float())
    if filters is not None:
        left_out, is_known = _left_out(logits, scaled, filters)
        scaled = scaled.masked_fill(left_out, -torch.inf)
    seeds, accepted = noise.seeds[:, None].expand(is_known.shape), None
    positions = noise.seq_lens[:, None] + torch.arange(logits.shape[1], device=device)
    if proposal is not None:
        drawn = _after_drafts(scaled.softmax(-1), is_known, noise, positions, proposal)
        accepted, scaled, seeds = _joined(drawn, scaled, seeds)
    ids = torch.arange(logits.shape[2], device=device)
    random = gumbel(seeds[..., None], positions[..., None], ids).float()
    tokens = (scaled + random.where(temperatures > 0, 0.0)).argmax(-1)
    if accepted is not None:
        tokens = accepted.where(accepted >= 0, tokens)
    return tokens.flatten()


def _left_out(logits: Tensor, scaled: Tensor, filters: SampleFilters) -> tuple[Tensor, Tensor]:
    """The tokens that the filters leave out, bool `[R, W, V]`, and the rows of which a kernel knows
    p, bool `[R, W]`.

    Args:
        logits: `[R, W, V]`; they decide the order of the tokens.
        scaled: float32, the same / temperature.
    """
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    left_out = filters.leave_out(scaled.softmax(-1).gather(-1, order))
    # Of a row that keeps so many, a kernel does not look at all, but it knows if all are kept.
    top_k, top_p, min_p = (part[:, None] for part in filters)
    is_open = ((~left_out).sum(-1) >= MOST_CANDIDATES) & (top_k > MOST_CANDIDATES)
    is_touched = (top_k < logits.shape[-1]) | (top_p < 1) | (min_p > 0)
    is_open &= is_touched & (logits.shape[-1] > MOST_CANDIDATES)
    return torch.zeros_like(left_out).scatter(-1, order, left_out), ~is_open


class _Drawn(NamedTuple):
    """P positions after drafts.

    Attributes:
        is_drawn: bool `[R, P]`, the positions after drafts that were drawn.
        tokens: int64 `[R, P]`, the drafts of these that are accepted, and -1.
        left: float32 `[R, P, V]`, log max(0, p - q); -inf of the draft.
    """

    is_drawn: Tensor
    tokens: Tensor
    left: Tensor


def _after_drafts(
    p: Tensor, is_known: Tensor, noise: BlockNoise, positions: Tensor, proposal: Proposal
) -> _Drawn:
    """Accept drafts or not.

    Args:
        p: float32 `[R, W, V]`.
        is_known: bool `[R, W]`, where a kernel knows p.
        positions: int64 `[R, W]`.
    """
    drafts = min(proposal.candidates.shape[1], p.shape[1] - 1)
    p, candidates, scores = (x[:, :drafts] for x in (p, proposal.candidates, proposal.scores))
    is_drawn = proposal.is_drawn[:, None] & is_known[:, :drafts] & scores.amax(-1).isfinite()
    q = torch.zeros_like(p).scatter(-1, candidates, scores.softmax(-1))
    draft = proposal.block[:, 1 : 1 + drafts, None]
    share = uniform(noise.seeds[:, None] ^ ACCEPTING, positions[:, :drafts])[..., None]
    left = torch.maximum(p - q, p * LEAST_LEFT).scatter(-1, draft, 0.0).log()
    is_accepted = is_drawn & (share * q.gather(-1, draft) < p.gather(-1, draft))[..., 0]
    return _Drawn(is_drawn, draft[..., 0].where(is_accepted, -1), left)


def _joined(drawn: _Drawn, scaled: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted drafts `[R, W]` and -1, and the log-weights `[R, W, V]` and seeds `[R, W]` that
    other tokens are drawn with."""
    drafts = drawn.tokens.shape[1]
    accepted = F.pad(drawn.tokens, (0, seeds.shape[1] - drafts), value=-1)
    left = drawn.left.where(drawn.is_drawn[..., None], scaled[:, :drafts])
    anew = (seeds[:, :drafts] ^ REDRAWING).where(drawn.is_drawn, seeds[:, :drafts])
    scaled, seeds = (
        torch.cat((of_drafts, others[:, drafts:]), 1)
        for of_drafts, others in ((left, scaled), (anew, seeds))
    )
    return accepted, scaled, seeds
