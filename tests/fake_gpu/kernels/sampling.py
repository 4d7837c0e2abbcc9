"""Sampling of FlashInfer and of SGLang's JIT."""

from __future__ import annotations

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


def top_p_renorm_probs(probs: Tensor, top_ps: Tensor) -> Tensor:
    p, i = probs.sort(-1, descending=True)
    p = p * (p.cumsum(-1) - p < top_ps.reshape(-1, 1))
    return torch.zeros_like(probs).scatter_(-1, i, p / p.sum(-1, keepdim=True))


def top_k_renorm_probs(probs: Tensor, top_ks: Tensor) -> Tensor:
    p, i = probs.sort(-1, descending=True)
    p = p * (torch.arange(p.shape[-1], device=p.device) < top_ks.reshape(-1, 1))
    return torch.zeros_like(probs).scatter_(-1, i, p / p.sum(-1, keepdim=True))
