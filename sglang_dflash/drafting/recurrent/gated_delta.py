"""Gated DeltaNet (arXiv 2412.06464) in plain torch: recurrence, convolution, gates and norm.

The recurrence exists token by token (`recurrent`) and in chunks (`chunked`). Arithmetic is float32
for inputs of any dtype. Per head, with state S `[V, K]`, log decay g <= 0 and write strength beta:

    S = exp(g) S;   d = beta (v - S k);   S = S + d k^T;   o = S q

Letters in shapes: N requests, T tokens, H query and key heads, HV value heads, K and V their head
dims, C channels of the convolution (2 H K + HV V: queries, keys, values), W its width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens per step of the chunked form; SGLang's prefix cache counts on this size.
CHUNK = 64
NORM_EPS = 1e-6
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
}


def gates(
    a_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of `a` and `b` `[..., HV]`, both float32 `[..., HV]`.

    Computed in float64. Vectorized float32 functions round differently in the body and in the tail
    of a vector, and a token has so few gates that its result would depend on the batch.
    """
    decay = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double(), beta, threshold)
    return decay.float(), b.double().sigmoid().float()


def per_value_head(
    q: Tensor, k: Tensor, heads: int, scale: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Repeat q and k `[..., H, K]` for the `heads` value heads, float32 `[..., HV, K]`.

    q is multiplied by `scale`; `normalize` first divides q and k by their lengths.
    """
    q, k = q.float(), k.float()
    if normalize:
        q, k = unit_length(q), unit_length(k)
    groups = heads // q.shape[-2]
    return (q * scale).repeat_interleave(groups, -2), k.repeat_interleave(groups, -2)


def unit_length(x: Tensor) -> Tensor:
    """Divide x `[..., K]` by its length (with `NORM_EPS` under the root)."""
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, every: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    One token and many run the same operations, so verifying a block gives the same result as
    decoding its tokens one at a time.

    Args:
        q, k: `[N, T, HV, K]`, from `per_value_head`.
        v: `[N, T, HV, V]`.
        g, beta: `[N, T, HV]`, from `gates`.
        state: `[N, HV, V, K]`; it is not changed.
        every: return the state after every token instead of the last one.

    Returns:
        Outputs `[N, T, HV, V]` and states `[1, N, HV, V, K]`, or `[T, N, HV, V, K]` with `every`,
        float32.
    """
    n, tokens, heads, dim = v.shape
    q, k, v, decay, beta = (
        x.float().transpose(0, 1).flatten(1, 2)[..., None]
        for x in (q, k, v, g.double().exp(), beta)
    )
    decay, beta, now = decay[..., None], beta[..., None], state.float().flatten(0, 1)
    states = now.new_empty(tokens if every else 1, *now.shape)
    out = now.new_empty(tokens, n * heads, dim, 1)
    for t in range(tokens):
        now = now * decay[t]
        write = (v[t] - now @ k[t]) * beta[t]
        now = torch.baddbmm(now, write, k[t].transpose(1, 2), out=states[t if every else 0])
        torch.bmm(now, q[t], out=out[t])
    return out[..., 0].unflatten(1, (n, heads)).transpose(0, 1), states.unflatten(1, (n, heads))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence over one sequence in chunks of `CHUNK` tokens.

    Args:
        q, k: `[T, HV, K]`, from `per_value_head`.
        v: `[T, HV, V]`.
        g, beta: `[T, HV]`, from `gates`.
        state: `[HV, V, K]`; it is not changed.

    Returns:
        Outputs `[T, HV, V]`, the last state `[HV, V, K]`, and the state at the start of every chunk
        `[chunks, HV, V, K]`, all float32.
    """
    tokens = len(v)
    size = min(CHUNK, tokens)
    # The padding of the last chunk neither decays the state (g = 0) nor writes to it (beta = 0).
    q, k, v, g, beta = (_in_chunks(x, size) for x in (q, k, v, g, beta))  # [HV, chunks, size, ...]
    total = g.cumsum(-1)[..., None]  # log decay from the chunk's start to the token
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # Decay from token j to token i at [i, j].
    between = (total - total.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    beta = beta[..., None]
    # A token's write depends on the earlier writes of the chunk. One solve gives all of them as
    # `from_values - from_keys S^T`, with S the state at the chunk's start. The solver takes the
    # diagonal as ones.
    system = beta * (k @ k.transpose(-1, -2)) * between
    writes = torch.cat([beta * v, beta * total.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True)
    from_values, from_keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = (q @ k.transpose(-1, -2)) * between
    q = q * total.exp()
    end = total[:, :, -1:]
    k = k * (end - total).exp()
    end, now, starts, out = end.exp(), state.float(), [], []
    for c in range(v.shape[1]):
        starts.append(now)
        read = now.transpose(-1, -2)
        write = from_values[:, c] - from_keys[:, c] @ read
        out.append(q[:, c] @ read + inside[:, c] @ write)
        now = now * end[:, c] + write.transpose(-1, -2) @ k[:, c]
    return torch.cat(out, 1)[:, :tokens].transpose(0, 1), now, torch.stack(starts)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """`[T, HV, ...]` -> float32 `[HV, chunks, size, ...]`, the last chunk padded with zeros."""
    x = x.float().transpose(0, 1)
    short = -x.shape[1] % size
    if short:
        x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def causal_conv(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then the activation. Products are rounded to the dtype of x and
    weight and summed in float32, as SGLang's Triton kernels do for decode and verify.

    Args:
        x: `[N, T, C]`.
        history: `[N, C, W - 1]`, the inputs before x.
        weight, bias: `[C, W]` and `[C]`.
        activation: a key of `ACTIVATIONS`; None for no activation.

    Returns:
        Outputs float32 `[N, T, C]`, and windows `[N, T + 1, C, W - 1]` in x's dtype: the last W - 1
        inputs before the first token (index 0) and after token t (index t + 1).
    """
    width, tokens = weight.shape[1], x.shape[1]
    inputs = torch.cat([history.transpose(1, 2).to(x.dtype), x], 1)
    # Products are summed tap by tap instead of by a convolution call, so that a token's sum is the
    # same in a block as in a forward of one token.
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if bias is not None:
        out += bias.float()
    for tap in range(width):
        out += inputs[:, tap : tap + tokens] * weight[:, tap]
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out, inputs.unfold(1, width - 1, 1)
