"""Gated DeltaNet in plain torch: the recurrence token by token and in chunks, its convolution, gates and norm.

Arithmetic is float32 whatever comes in. Per head, with state S `[V, K]`, decay g <= 0 and write strength beta of a token:

    S = exp(g) S;   d = beta (v - S k);   S = S + d k^T;   o = S q
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


def split_projections(
    qkvz: Tensor, ba: Tensor, heads_qk: int, heads_v: int, dim_qk: int, dim_v: int
) -> tuple[Tensor, ...]:
    """`[T, q k v z]` and `[T, b a]` -> qkv `[T, 2 H K + HV V]`, z `[T, HV, V]`, b and a `[T, HV]`."""
    size = 2 * heads_qk * dim_qk + heads_v * dim_v
    qkv, z = qkvz[:, :size].contiguous(), qkvz[:, size:].reshape(-1, heads_v, dim_v)
    return qkv, z, ba[:, :heads_v].contiguous(), ba[:, heads_v : 2 * heads_v].contiguous()


def gates(
    a_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength, float32 and of a's shape `[..., HV]`.

    Computed in float64: float32 functions round differently inside and at the end of a vector of numbers, and these are so few
    per token that a request's would depend on what it is batched with.
    """
    decay = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double(), beta, threshold)
    return decay.float(), b.double().sigmoid().float()


def per_value_head(
    q: Tensor, k: Tensor, heads: int, scale: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """q and k `[..., H, K]` as float32 `[..., HV, K]`: unit length where asked for, q scaled, each shared by HV / H value heads."""
    q, k = q.float(), k.float()
    if normalise:
        q, k = unit_length(q), unit_length(k)
    groups = heads // q.shape[-2]
    return (q * scale).repeat_interleave(groups, -2), k.repeat_interleave(groups, -2)


def unit_length(x: Tensor) -> Tensor:
    """x `[..., K]` divided by its length."""
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, every: bool = False
) -> tuple[Tensor, Tensor]:
    """q, k `[N, T, HV, K]`, v `[N, T, HV, V]`, g, beta `[N, T, HV]`, state `[N, HV, V, K]`.

    Returns outputs `[N, T, HV, V]` and the last state `[1, N, HV, V, K]`, or the state after `every` token `[T, N, HV, V, K]`,
    float32. One token and many run the same operations, so that verifying a block gives what decoding it would.
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


@dataclass(frozen=True)
class RecurrentLayers:
    """What the states of L Gated DeltaNet layers of one shape depend on beside their inputs.

    conv_weight `[L, C, W]`, conv_bias `[L, C]`, a_log and dt_bias `[L, HV]`; C = 2 H K + HV V channels: queries, keys, values.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    activation: str | None
    a_log: Tensor
    dt_bias: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class VerifyInputs(NamedTuple):
    """What verification kept of up to R blocks: `window` `[L, R, C, W - 1]`, the convolution's last inputs before the block; its
    `inputs` `[L, R, B, C]`; the gates' inputs `a` and `b` `[L, R, B, HV]`. Any strides."""

    window: Tensor
    inputs: Tensor
    a: Tensor
    b: Tensor


def fold_(
    layers: RecurrentLayers,
    states: Tensor,
    kept: VerifyInputs,
    rows: Tensor,
    source: Tensor,
    target: Tensor,
    lengths: Tensor,
) -> None:
    """Move states on by the first `lengths` tokens of their blocks, all layers at once, in place.

    Args:
        states: the pool of states `[L, S, HV, V, K]`.
        rows: which of the kept blocks, int64 `[N]`.
        source, target: slots of the states before and after, int64 `[N]`; no target is another row's source or target, and a row
            whose target is negative is left out.
        lengths: tokens that stay, 0 to B, int64 `[N]`.
    """
    wanted = (target >= 0).nonzero()[:, 0]
    if not len(wanted):
        return
    rows, source, target, lengths = (x[wanted] for x in (rows, source, target, lengths))
    window, inputs, a, b = (x[:, rows] for x in kept)
    block, keys = inputs.shape[2], layers.key_heads * layers.key_dim
    k, v = _keys_and_values(layers, window[:, :, keys:], inputs[..., keys:])
    g, beta = gates(layers.a_log[:, None, None], a, layers.dt_bias[:, None, None], b)
    # A token that stays out neither decays the state nor writes to it.
    out = (torch.arange(block, device=rows.device) >= lengths[:, None])[..., None]
    total = (
        g.masked_fill(out, 0.0).transpose(2, 3).cumsum(-1)[..., None]
    )  # [L, N, HV, B, 1], log decay since the block's start
    beta = beta.masked_fill(out, 0.0).transpose(2, 3)[..., None]
    now = states[:, source].float()
    writes, _ = _writes(k, v, total, beta, now)
    end = total[..., -1:, :]
    now.mul_(end.exp()).flatten(0, 2).baddbmm_(
        writes.flatten(0, 2).transpose(1, 2), (k * (end - total).exp()).flatten(0, 2)
    )
    states[:, target] = now.to(states.dtype)


def block_outputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """What a block of tokens reads, all at once; the state stays as it is, and nobody learns what it is in between.

    q, k `[N, T, HV, K]`, v `[N, T, HV, V]`, g, beta `[N, T, HV]`, state `[N, HV, V, K]`; returns `[N, T, HV, V]`, float32.
    """
    q, k, v = (x.float().transpose(1, 2).contiguous() for x in (q, k, v))
    total, beta, state = (
        g.transpose(1, 2).cumsum(-1)[..., None],
        beta.transpose(1, 2)[..., None],
        state.float(),
    )
    writes, between = _writes(k, v, total, beta, state)
    out = total.exp() * (q @ state.transpose(-1, -2)) + (q @ k.transpose(-1, -2) * between) @ writes
    return out.transpose(1, 2)


def _writes(
    k: Tensor, v: Tensor, total: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What each token of a block writes into the state `[..., V, K]`, `[..., T, V]`; and the decay from token j to token i `[..., T, T]`.

    k `[..., T, K]`, v `[..., T, V]`, beta and the log decay since the block's start, `total`, `[..., T, 1]`. A token's write depends on
    those before it, and one solve gives them all; the solver takes the diagonal as ones.
    """
    tokens = k.shape[-2]
    lower = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril()
    between = (
        (total - total.transpose(-1, -2)).masked_fill_(~lower, float("-inf")).exp_()
    )  # [i, j]: from token j to token i
    wanted = beta * (v - total.exp() * (k @ state.transpose(-1, -2)))
    system = beta * (k @ k.transpose(-1, -2)) * between
    return torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True), between


def _keys_and_values(
    layers: RecurrentLayers, window: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """From the key and value channels of a block: unit keys `[L, N, HV, B, K]` and values `[L, N, HV, B, V]`, float32."""
    keys, depth = layers.key_heads * layers.key_dim, len(inputs)
    weight, bias = layers.conv_weight[:, keys:].flatten(0, 1), layers.conv_bias
    # A depthwise convolution does not care whose channels they are: those of all layers stand side by side.
    mixed, _ = causal_conv(
        inputs.permute(1, 2, 0, 3).flatten(2), window.transpose(0, 1).flatten(1, 2), weight,
        None if bias is None else bias[:, keys:].flatten(), layers.activation,
    )  # fmt: skip
    mixed = mixed.to(inputs.dtype).unflatten(-1, (depth, -1)).permute(2, 0, 1, 3)  # [L, N, B, C]
    k, v = (
        mixed[..., :keys].unflatten(-1, (-1, layers.key_dim)),
        mixed[..., keys:].unflatten(-1, (-1, layers.value_dim)),
    )
    k = unit_length(k.transpose(2, 3).float().contiguous()).repeat_interleave(
        layers.value_heads // layers.key_heads, 2
    )
    return k, v.transpose(2, 3).float().contiguous()


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence: q, k `[T, HV, K]`, v `[T, HV, V]`, g, beta `[T, HV]`, state `[HV, V, K]`.

    Returns outputs `[T, HV, V]`, the last state, and the state at the start of every chunk `[C, HV, V, K]`, float32.
    """
    tokens = len(v)
    size = min(CHUNK, tokens)
    # Tokens that fill up the last chunk neither decay the state (g = 0) nor write to it (beta = 0).
    q, k, v, g, beta = (_in_chunks(x, size) for x in (q, k, v, g, beta))  # [HV, C, size, ...]
    total = g.cumsum(-1)[..., None]  # log decay from the chunk's start to the token
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = (
        (total - total.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    )  # [i, j]: from token j to token i
    beta = beta[..., None]
    # A token's write depends on the writes before it in the chunk; solving for all of them at once gives them as
    # `own - carried S^T`, with S the state at the chunk's start. The solver takes the diagonal as ones.
    system = beta * (k @ k.transpose(-1, -2)) * between
    wanted = torch.cat([beta * v, beta * total.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    own, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = (q @ k.transpose(-1, -2)) * between
    q = q * total.exp()
    end = total[:, :, -1:]
    k = k * (end - total).exp()
    end, now, starts, out = end.exp(), state.float(), [], []
    for c in range(v.shape[1]):
        starts.append(now)
        read = now.transpose(-1, -2)
        write = own[:, c] - carried[:, c] @ read
        out.append(q[:, c] @ read + inside[:, c] @ write)
        now = now * end[:, c] + write.transpose(-1, -2) @ k[:, c]
    return torch.cat(out, 1)[:, :tokens].transpose(0, 1), now, torch.stack(starts)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """`[T, HV, ...]` -> float32 `[HV, C, size, ...]`, the last chunk filled up with zeros."""
    x = x.float().transpose(0, 1)
    short = -x.shape[1] % size
    if short:
        x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def causal_conv(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Depthwise: x `[N, T, C]` after history `[N, C, W - 1]`, weight `[C, W]`, bias `[C]`.

    Returns float32 `[N, T, C]`, and the windows: the last W - 1 inputs after every token `[N, T, C, W - 1]`, and before the first.
    """
    width, tokens = weight.shape[1], x.shape[1]
    inputs = torch.cat([history.transpose(1, 2).to(x.dtype), x], 1)
    wide, taps = inputs.float(), weight.float()
    # Products summed tap by tap, not a convolution call: a token's sum is then the same alone and in a block.
    out = wide[:, :tokens] * taps[:, 0]
    for tap in range(1, width):
        out += wide[:, tap : tap + tokens] * taps[:, tap]
    if bias is not None:
        out += bias.float()
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out, inputs.unfold(1, width - 1, 1)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None,
    eps: float,
    group: int | None = None,
    norm_first: bool = True,
    activation: str = "silu",
) -> Tensor:
    """x and z `[..., N]`, weight `[N]`: normalised over groups of `group` (default all) and gated by z, in x's dtype."""
    out = x.float()
    gate = None if z is None else ACTIVATIONS[activation](z.reshape(x.shape).float())
    if gate is not None and not norm_first:
        out = out * gate
    grouped = out.unflatten(-1, (-1, group or out.shape[-1]))
    out = (grouped * (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(
        -2
    ) * weight.float()
    return (out * gate if gate is not None and norm_first else out).to(x.dtype)
