"""Sampling of FlashInfer and of SGLang's JIT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def speculative_sampling(
    predicts: Tensor,
    accept_index: Tensor,
    accept_num: Tensor,
    candidates: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    target: Tensor,
    draft: Tensor,
    single: float,
    acc: float,
) -> None:
    """Tree speculative sampling of the target only, one request after another."""
    for b in range(len(candidates)):
        at, last, accepted = 0, index[b, 0], 0
        accept_index[b, 0] = last
        while True:
            node, total, taken = int(next_token[b, at]), 0.0, False
            while node != -1 and not taken:
                token = candidates[b, node]
                p = float(target[b, at, token])
                total += p
                taken = float(coins[b, at]) <= total / acc or p >= single
                if not taken:
                    draft[b, at, token] = target[b, at, token]
                    node = int(next_sibling[b, node])
            if not taken:
                break
            predicts[last] = token
            accepted, last, at = accepted + 1, index[b, node], node
            accept_index[b, accepted] = last
        accept_num[b] = accepted
        rest = target[b, at]
        if accepted < candidates.shape[1] - 1:
            rest = (rest - draft[b, at]).relu()
        drawn = int((rest.cumsum(0) <= final_coins[b] * rest.sum()).sum())
        predicts[last] = min(drawn, len(rest) - 1)


def kept(probs: Tensor, mask: Tensor, order: Tensor) -> Tensor:
    """Probabilities renormalized over those of `mask`, both sorted by `order`."""
    probs = probs * mask
    return torch.zeros_like(probs).scatter_(-1, order, probs / probs.sum(-1, keepdim=True))


def column(limit: Any, probs: Tensor) -> Tensor:
    """A limit per row, or one for all, as a column."""
    if not isinstance(limit, Tensor):
        limit = torch.full((len(probs),), limit, device=probs.device)
    return limit.reshape(-1, 1)


def top_p_renorm_probs(probs: Tensor, top_p: Any, is_deterministic: bool = False) -> Tensor:
    sorted_probs, order = probs.sort(-1, descending=True)
    before = sorted_probs.cumsum(-1) - sorted_probs
    return kept(sorted_probs, before < column(top_p, probs), order)


def top_k_renorm_probs(probs: Tensor, top_k: Any, is_deterministic: bool = False) -> Tensor:
    sorted_probs, order = probs.sort(-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    return kept(sorted_probs, ranks < column(top_k, probs), order)


def drawn(weights: Tensor) -> Tensor:
    """A token of each row, without a wait of the host."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1).int()


def min_p_sampling(probs: Tensor, min_p: Any, *_: Any, **__: Any) -> Tensor:
    least = probs.amax(-1, keepdim=True) * column(min_p, probs)
    return drawn(probs * (probs >= least))


def top_k_top_p_sampling(probs: Tensor, top_k: Any, top_p: Any, *_: Any, **how: Any) -> Tensor:
    """Sample; with `filter_apply_order="joint"`, both limits are of the whole distribution."""
    of_k = top_k_renorm_probs(probs, top_k)
    of_p = probs if how.get("filter_apply_order") == "joint" else of_k
    return drawn(of_k * (top_p_renorm_probs(of_p, top_p) > 0))


def renorm_into(renorm: Callable[..., Tensor]) -> Callable[..., None]:
    """Return sgl_kernel's operator: it takes a limit per row, or a number for all."""

    def run(probs: Tensor, out: Tensor, limits: Tensor | None, limit: Any) -> None:
        out.copy_(renorm(probs, limit if limits is None else limits))

    return run


OPERATORS = {
    "top_k_renorm_probs": renorm_into(top_k_renorm_probs),
    "top_p_renorm_probs": renorm_into(top_p_renorm_probs),
}
# Functions of flashinfer.sampling.
FLASHINFER: dict[str, Callable[..., Tensor]] = {
    "top_k_renorm_probs": top_k_renorm_probs,
    "top_p_renorm_probs": top_p_renorm_probs,
    "min_p_sampling_from_probs": min_p_sampling,
    "top_k_top_p_sampling_from_probs": top_k_top_p_sampling,
}
