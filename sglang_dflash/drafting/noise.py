"""Drafts of sampled requests: with a seed they follow the target's random numbers, without one they
are drawn.

SGLang's seeded sampler is a Gumbel-argmax: the target's token is the v with the largest
log p_target(v) + g(seed, position, v), g being Gumbel noise from a hash (`multinomial_with_seed` in
its `srt/layers/sampler.py`). A draft that takes the largest log p_draft(v) + g(seed, position, v),
with the same g, mostly takes the same v if the two distributions are alike (coupling by common
random numbers: Daliri, Musco and Suresh, arXiv 2408.07978). The target's token does not depend on
the draft, so the output stays what it is.

So it is for requests with a seed. Without one, an answer has to follow the target's distribution
only, and more drafts can be accepted: one that was drawn from q is accepted with probability
min(1, p(v) / q(v)), and else the target's token is drawn from max(0, p - q) (Leviathan et al.,
arXiv 2211.17192). What decides there must be independent of what the draft was drawn with: noise
that both share gives wrong outputs.

Letters in shapes: R requests; B block positions; P drafts of a block; W positions of a step; K
candidates; V tokens of the vocabulary, or of a rank's part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rows of what a draft head returns for a block with noise: the draft's likeliest tokens, and its
# tokens with noise.
RULES = LIKELIEST, SAMPLED = 0, 1
_LOW32 = 0xFFFFFFFF
# Seeds of random numbers that are independent of a seed's own are this, exclusive or the seed.
ACCEPTING, REDRAWING = 0x3C6EF372FE94F82B, 0x510E527FADE682D1
# Of max(0, p - q) at least this times p is left of every token but the rejected draft. By rounding,
# nothing else may be left where p and q are equal, and a token that p does not have would be drawn.
LEAST_LEFT = 2.0**-40


class LogitScale(NamedTuple):
    """The draft's logits from those of its lm_head: `softcap(multiplier * logits)`. Both keep the
    order of the logits, so they change sampled drafts only."""

    multiplier: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """float32 of any shape. Infinite logits stay infinite."""
        scaled = logits.float()
        if self.multiplier != 1:
            scaled = scaled * self.multiplier
        if self.softcap is None:
            return scaled
        capped = self.softcap * (scaled / self.softcap).tanh()
        return capped.where(scaled.isfinite(), scaled)


class BlockNoise(NamedTuple):
    """The random numbers that the target samples the tokens of a block with.

    Attributes:
        seeds: int64 `[R]`.
        temperatures: float32 `[R]`; 0 for a greedy request, which has no noise.
        seq_lens: int64 `[R]`, positions of the bonus tokens. The target samples what follows the
            token at position p with the noise of p, so draft j, from 1 on, has the noise of
            `seq_lens + j - 1`.
    """

    seeds: Tensor
    temperatures: Tensor
    seq_lens: Tensor

    def scores(self, logits: Tensor, ids: Tensor, first: int = 1) -> Tensor:
        """Return the scores that coupled drafts are the argmax of: logits / temperature + noise,
        or the plain logits for a greedy request.

        Args:
            logits: `[R, P, K]`, of P drafts in a row.
            ids: int64, the token ids of the logits: `[K]` or `[R, P, K]`.
            first: which draft of the block, 1 to B - 1, the first of the P is.

        Returns:
            float32 `[R, P, K]`.
        """
        offsets = torch.arange(first - 1, first - 1 + logits.shape[1], device=logits.device)
        positions = (self.seq_lens[:, None] + offsets)[..., None]
        noise = gumbel(self.seeds[:, None, None], positions, ids).float()
        temperatures = self.temperatures[:, None, None]
        is_sampled = temperatures > 0
        return (logits.float() / temperatures + noise).where(is_sampled, logits.float())

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return scores float32 `[R, K]` / temperature; the scores of a greedy request."""
        temperatures = self.temperatures[:, None]
        return (scores / temperatures).where(temperatures > 0, scores)


class SampledBlocks(NamedTuple):
    """Drafted blocks of a batch with noise.

    Attributes:
        tokens: int64 `[2, R, B]`, a block by each of `RULES`; of a head `[2, R, P]`, its drafts.
        candidates: int64 `[R, P, K]`, the tokens that a draft with noise was drawn from; distinct.
        scores: float32 `[R, P, K]`, their log-probabilities, but for a constant of each draft. If
            the largest is not finite, the draft was not drawn.
    """

    tokens: Tensor
    candidates: Tensor
    scores: Tensor


def likeliest(drafted: Tensor | SampledBlocks) -> Tensor:
    """The likeliest drafts int64 `[R, B]` of what a drafter returns with or without noise."""
    return drafted.tokens[LIKELIEST] if isinstance(drafted, SampledBlocks) else drafted


def sampled(drafted: Tensor | SampledBlocks) -> Tensor:
    """The drafts int64 `[R, B]` of what a drafter returns: with noise, those that it decides."""
    # A copy begins where kernels have been compiled for.
    return drafted.tokens[SAMPLED].clone() if isinstance(drafted, SampledBlocks) else drafted


class Proposal(NamedTuple):
    """The drafts that a step verifies, and the distributions that they were drawn from.

    Attributes:
        block: int64 `[R, W]`.
        is_drawn: bool `[R]`, the requests of which this holds; False for greedy ones.
        candidates: see `SampledBlocks`. Drafts behind the P-th were not drawn.
        scores: see there.
    """

    block: Tensor
    is_drawn: Tensor
    candidates: Tensor
    scores: Tensor


def proposal_of(
    block: Tensor,
    drafted: Tensor | SampledBlocks,
    noise: BlockNoise | None,
    seeded: Tensor | None,
    looks_up: Tensor | None = None,
) -> Proposal | None:
    """Return what the drafts of a step were drawn from; None if they were not.

    Args:
        block: int64 `[R, W]`, which the step verifies.
        drafted: see `Proposer.propose`.
        noise: that was handed to it.
        seeded: bool `[R]`, the requests with a seed; None if no request has one.
        looks_up: bool `[R]`, the requests whose drafts are looked up; None for none. It may not
            depend on the noise of this block.
    """
    if noise is None or not isinstance(drafted, SampledBlocks):
        return None
    is_drawn = noise.temperatures > 0
    for others in (seeded, looks_up):
        if others is not None:
            is_drawn = is_drawn & ~others
    return Proposal(block, is_drawn, drafted.candidates, drafted.scores)


class SampleFilters(NamedTuple):
    """The filters of R requests: a sample is one of the likeliest tokens, which they keep.

    Attributes:
        top_ks: int32 `[R]`, the number of tokens at most; 1 for a greedy request.
        top_ps: float32 `[R]`. A token is left out if those that are likelier have more than this
            probability; 1 leaves none out.
        min_ps: float32 `[R]`. A token is left out whose probability is less than this times that of
            the likeliest; 0 leaves none out.
    """

    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor

    def leave_out(self, ordered: Tensor) -> Tensor:
        """Return which tokens are left out, bool `[R, ..., V]`.

        Args:
            ordered: float32 `[R, ..., V]`, probabilities in descending order.
        """
        top_ks, top_ps, min_ps = (part.view(-1, *[1] * (ordered.dim() - 1)) for part in self)
        likelier = ordered.cumsum(-1) - ordered
        left_out = torch.arange(ordered.shape[-1], device=ordered.device) >= top_ks
        left_out = left_out | ((likelier > top_ps) & (top_ps < 1))
        return left_out | (ordered < ordered[..., :1] * min_ps)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise float64 of integer tensors that broadcast, bit for bit SGLang's."""
    x = murmur_hash32(seeds, positions, ids).double() / _LOW32
    x = x.log_().clamp_(torch.finfo(x.dtype).min, -(2.0**-32)).neg_()
    return x.log_().neg_()


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Random numbers float32 in [0, 1) of integer tensors that broadcast."""
    # As many bits as float32 has: rounding must not make 1 of it.
    hashes = murmur_hash32(seeds, positions, torch.zeros_like(positions))
    return (hashes >> 8).float() / 2**24


def murmur_hash32(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """MurmurHash3 (Appleby, x86 32-bit) of 64-bit seeds, 32-bit positions and 32-bit token ids.

    int64 in [0, 2 ** 32) of integer tensors that broadcast.
    """

    def shifted(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & (_LOW32 >> bits)

    def rotated(x: Tensor, bits: int) -> Tensor:
        return (x << bits) | shifted(x, 32 - bits)

    # In int32, which wraps and is faster than int64 with masks. Factors are negative for that.
    h = torch.zeros((), dtype=torch.int32, device=seeds.device)
    for word in (seeds.long(), seeds.long() >> 32, positions, ids):
        k = rotated(word.int() * (0xCC9E2D51 - 2**32), 15) * 0x1B873593
        h = rotated(h ^ k, 13) * 5 + (0xE6546B64 - 2**32)
    h = h ^ 16
    h = (h ^ shifted(h, 16)) * (0x85EBCA6B - 2**32)
    h = (h ^ shifted(h, 13)) * (0xC2B2AE35 - 2**32)
    return (h ^ shifted(h, 16)).long() & _LOW32
