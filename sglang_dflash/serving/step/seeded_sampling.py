"""Seeded sampling that depends on the request alone.

SGLang's seeded sampler takes the token with the largest log p(v) + g(seed, position, v), g being
Gumbel noise from a hash (`multinomial_with_seed`). If any request of the batch has top-k, top-p or
min-p, and a greedy one has top-k 1, it sorts the probabilities of all of them and numbers v by
rank: every seeded answer of the batch changes. Here v is always the token id.

Letters in shapes: N rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers import sampler as sglangs
from sglang.srt.layers.sampler import (
    _SamplingMaskCapture as MaskCapture,
)
from sglang.srt.layers.sampler import (
    multinomial_with_seed,
)
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from sglang_dflash.drafting.noise import SampleFilters

# Rows that are sampled at a time.
ROWS = 64


def sample_by_token_id(
    original: Any, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool
) -> tuple[Tensor, MaskCapture | None]:
    """Around `Sampler._sample_from_probs`: rows with a seed, all of a batch or none.

    Args:
        probs: `[N, V]`, after temperature.
        info: SGLang's sampling parameters of the rows.
        positions: int `[N]`.
        simple: whether no row has top-k, top-p or min-p.

    Returns:
        Tokens int32 `[N]`, and what `return_sampling_mask` shows of rows that asked for it.
    """
    if info.sampling_seed is None:
        return original(sampler, probs, info, positions, simple)
    rows = info.sampling_mask_batch_indices
    if rows is None:
        # Each takes several times the memory of its probabilities, in float64.
        pieces = (slice(first, first + ROWS) for first in range(0, len(probs), ROWS))
        parts = [
            _drawn(probs[piece], _sampling_of_rows(info, piece), positions[piece], simple)[0]
            for piece in pieces
        ]
        return torch.cat(parts), None
    tokens, weights = _drawn(probs, info, positions, simple)
    shown = weights[rows]
    chosen = shown.gather(1, tokens[rows][:, None])[:, 0]
    return tokens, MaskCapture(shown, None, chosen, rows)


def _drawn(probs: Tensor, info: Any, positions: Tensor, simple: bool) -> tuple[Tensor, Tensor]:
    """Tokens int32 `[N]`, and the weights `[N, V]` that they were drawn by."""
    weights = probs if simple else kept_weights(probs, info)
    tokens = multinomial_with_seed(torch.log(weights), info.sampling_seed, positions)
    return tokens.view(-1).int(), weights


def _sampling_of_rows(info: Any, rows: slice) -> Any:
    """The sampling parameters of some rows, as far as they are read here."""
    names = ("sampling_seed", "top_ks", "top_ps", "min_ps")
    return SimpleNamespace(
        need_top_k_sampling=info.need_top_k_sampling,
        need_top_p_sampling=info.need_top_p_sampling,
        **{name: getattr(info, name)[rows] for name in names},
    )


def warm_up(device: torch.device, vocab_size: int) -> None:
    """Let SGLang compile its sampler, for one row and for several, and load its kernels of top-k
    and top-p, before a request needs them. On a CPU nothing is compiled."""
    for rows in (1, 2) if device.type != "cpu" else ():
        ones = torch.ones(rows, dtype=torch.int64, device=device)
        info = SimpleNamespace(
            # A graph that is compiled for one tensor as both would serve no other call.
            sampling_seed=ones.clone(),
            top_ks=ones.int(),
            top_ps=ones.float() / 2,
            min_ps=ones.float(),
            need_top_k_sampling=True,
            need_top_p_sampling=True,
        )
        probs = torch.full((rows, vocab_size), 1 / vocab_size, device=device)
        _drawn(probs, info, ones, False)


def kept_weights(probs: Tensor, info: Any) -> Tensor:
    """`probs` `[N, V]` with zeros for tokens that top-k, top-p or min-p leave out, not normalized.

    The rules are those of SGLang's torch sampler. A row's result does not depend on other rows: of
    equal probabilities the lower token ids are kept, and without top-p nothing is left out by a sum
    that rounds to more than 1.
    """
    if get_exec().kernel.sampling_backend == "flashinfer":
        return _kept_by_kernels(probs, info)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    left_out = SampleFilters(info.top_ks, info.top_ps, info.min_ps).leave_out(ordered)
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill_(left_out, 0))


def _kept_by_kernels(probs: Tensor, info: Any) -> Tensor:
    """`kept_weights` by SGLang's kernels, which renormalize instead of sorting the vocabulary.

    As in its FlashInfer sampler, top-p is of the whole distribution. Tokens as likely as the last
    one that is kept are kept too, except by greedy requests, which take the first.
    """
    # The kernels read whole rows: a vocabulary that was padded leaves gaps between them.
    probs = probs.contiguous()
    is_kept = torch.ones_like(probs, dtype=torch.bool)
    if info.need_top_k_sampling:
        is_kept &= sglangs.top_k_renorm_prob(probs, info.top_ks) > 0
    if info.need_top_p_sampling:
        # A sum that rounds to more than 1 must not leave a token out.
        is_kept &= (sglangs.top_p_renorm_prob(probs, info.top_ps) > 0) | (info.top_ps >= 1)[:, None]
    likeliest, first = probs.max(-1, keepdim=True)
    is_kept &= probs >= likeliest * info.min_ps[:, None]
    is_first = torch.arange(probs.shape[-1], device=probs.device) == first
    is_kept &= is_first | (info.top_ks > 1)[:, None]
    return probs.masked_fill(~is_kept, 0)
