"""Replay: move Gated DeltaNet states forward by the accepted tokens of a verified block.

Verification leaves the states unchanged and keeps its inputs (`VerifyInputs`). `block_outputs`
computes the outputs of a block without the states between its tokens; `fold_` and `move_windows_`
then apply the accepted tokens. Letters in shapes as in `gated_delta`, and: L layers, R verified
blocks, B block positions, S slots of the state pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.recurrent.gated_delta import causal_conv, gates, unit_length


@dataclass(frozen=True)
class RecurrentLayers:
    """The weights of L Gated DeltaNet layers of one shape that the states depend on.

    Attributes:
        conv_weight: `[L, C, W]`.
        conv_bias: `[L, C]`; None for no bias.
        activation: of the convolution, a key of `gated_delta.ACTIVATIONS`; None for none.
        a_log, dt_bias: `[L, HV]`.
        key_heads, value_heads: H and HV on this rank.
        key_dim, value_dim: K and V.
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

    def copy_(self, other: RecurrentLayers) -> None:
        """Take over the weights of the same layers, in place."""
        for name in ("conv_weight", "conv_bias", "a_log", "dt_bias"):
            weight = getattr(self, name)
            if weight is not None:
                weight.copy_(getattr(other, name))


class VerifyInputs(NamedTuple):
    """Tensors that verification saved for up to R blocks. Any strides.

    Attributes:
        window: `[L, R, C, W - 1]`, the convolution's last inputs before the block.
        inputs: `[L, R, B, C]`, the convolution's inputs in the block.
        a, b: `[L, R, B, HV]`, the inputs of the gates.
    """

    window: Tensor
    inputs: Tensor
    a: Tensor
    b: Tensor


class Moves(NamedTuple):
    """Moves of the recurrent states of N blocks, in all layers. A row whose slot after is negative
    is skipped.

    Attributes:
        rows: int64 `[N]`, the blocks.
        slots_before, slots_after: int64 `[N]`, of the states. No slot after may be a slot of
            another row.
        lengths: int64 `[N]`, accepted tokens, up to B.
        checkpoints: int64 `[N]`, slots of the states after the first `steps` tokens; negative for
            none, as in all rows if this is None.
        steps: int64 `[N]`, 1 to `lengths` where there is a checkpoint.
    """

    rows: Tensor
    slots_before: Tensor
    slots_after: Tensor
    lengths: Tensor
    checkpoints: Tensor | None = None
    steps: Tensor | None = None

    def parts(self) -> Iterator[Moves]:
        """Yield the moves to checkpoints, then to the slots after, of rows that are not skipped."""
        moves = self.slots_after >= 0
        if self.checkpoints is not None and self.steps is not None:
            due = moves & (self.checkpoints >= 0)
            every = (self.rows, self.slots_before, self.checkpoints, self.steps)
            yield Moves(*(x[due] for x in every))
        yield Moves(*(x[moves] for x in self[:4]))


def fold_(layers: RecurrentLayers, states: Tensor, verified: VerifyInputs, moves: Moves) -> None:
    """Apply the accepted tokens to the states of all layers, in place.

    Args:
        states: `[L, S, HV, V, K]`, the state pool.
        verified: the inputs of the blocks.
    """
    for part in moves.parts():
        if len(part.rows):
            _fold_part_(layers, states, verified, part)


def move_windows_(pool: Tensor, windows: Tensor, moves: Moves) -> None:
    """Copy the convolution's window after the accepted tokens of each block, in all layers.

    Args:
        pool: `[L, S, C, W - 1]`.
        windows: `[L, R, B, C, W - 1]`, the last inputs after every block position.
    """
    for part in moves.parts():
        pool[:, part.slots_after] = windows[:, part.rows, part.lengths - 1]


def _fold_part_(
    layers: RecurrentLayers, states: Tensor, verified: VerifyInputs, part: Moves
) -> None:
    rows, slots_before, slots_after, lengths = part[:4]
    window, inputs, a, b = (x[:, rows] for x in verified)
    block, keys = inputs.shape[2], layers.key_heads * layers.key_dim
    rejected = (torch.arange(block, device=rows.device) >= lengths[:, None])[..., None]
    # After a narrow step, of another request: 0 times what is no number would be none.
    inputs.masked_fill_(rejected, 0.0)
    k, v = _keys_and_values(layers, window[:, :, keys:], inputs[..., keys:])
    g, beta = gates(layers.a_log[:, None, None], a, layers.dt_bias[:, None, None], b)
    # A rejected token neither decays the state nor writes to it.
    # Log decay since the block's start, [L, N, HV, B, 1].
    total = g.masked_fill(rejected, 0.0).transpose(2, 3).cumsum(-1)[..., None]
    beta = beta.masked_fill(rejected, 0.0).transpose(2, 3)[..., None]
    now = states[:, slots_before].float()
    writes, _ = _writes(k, v, total, beta, now)
    end = total[..., -1:, :]
    now.mul_(end.exp()).flatten(0, 2).baddbmm_(
        writes.flatten(0, 2).transpose(1, 2), (k * (end - total).exp()).flatten(0, 2)
    )
    states[:, slots_after] = now.to(states.dtype)


def block_outputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Outputs of a block of tokens, computed at once, without the states between the tokens.

    Args:
        q, k: `[N, T, HV, K]`, from `gated_delta.per_value_head`.
        v: `[N, T, HV, V]`.
        g, beta: `[N, T, HV]`, from `gated_delta.gates`.
        state: `[N, HV, V, K]`; it is not changed.

    Returns:
        `[N, T, HV, V]`, float32.
    """
    q, k, v = (x.float().transpose(1, 2).contiguous() for x in (q, k, v))
    total, beta = g.transpose(1, 2).cumsum(-1)[..., None], beta.transpose(1, 2)[..., None]
    state = state.float()
    writes, between = _writes(k, v, total, beta, state)
    out = total.exp() * (q @ state.transpose(-1, -2)) + (q @ k.transpose(-1, -2) * between) @ writes
    return out.transpose(1, 2)


def _writes(
    k: Tensor, v: Tensor, total: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes of each token `[..., T, V]`, and the decay from token j to i at [i, j] `[..., T, T]`.

    A token's write depends on those before it; one solve gives all of them. The solver takes the
    diagonal as ones.

    Args:
        k, v: `[..., T, K]` and `[..., T, V]`.
        total, beta: `[..., T, 1]`, log decay since the block's start, and write strength.
        state: `[..., V, K]` at the block's start.
    """
    tokens = k.shape[-2]
    lower = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril()
    between = (total - total.transpose(-1, -2)).masked_fill_(~lower, float("-inf")).exp_()
    # What each would write if none came before it.
    alone = beta * (v - total.exp() * (k @ state.transpose(-1, -2)))
    system = beta * (k @ k.transpose(-1, -2)) * between
    return _solved(system, alone), between


def _keys_and_values(
    layers: RecurrentLayers, window: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Unit keys `[L, N, HV, B, K]` and values `[L, N, HV, B, V]` of a block, float32.

    `window` `[L, N, H K + HV V, W - 1]` and `inputs` `[L, N, B, H K + HV V]` hold the channels of
    keys and values only.
    """
    keys, depth = layers.key_heads * layers.key_dim, len(inputs)
    weight, bias = layers.conv_weight[:, keys:].flatten(0, 1), layers.conv_bias
    # The convolution is depthwise: one call runs it over the channels of all layers side by side.
    mixed, _ = causal_conv(
        inputs.permute(1, 2, 0, 3).flatten(2),
        window.transpose(0, 1).flatten(1, 2),
        weight,
        None if bias is None else bias[:, keys:].flatten(),
        layers.activation,
    )
    mixed = mixed.to(inputs.dtype).unflatten(-1, (depth, -1)).permute(2, 0, 1, 3)  # [L, N, B, C]
    k = mixed[..., :keys].unflatten(-1, (-1, layers.key_dim)).transpose(2, 3)
    v = mixed[..., keys:].unflatten(-1, (-1, layers.value_dim)).transpose(2, 3)
    groups = layers.value_heads // layers.key_heads
    k = unit_length(k.float().contiguous()).repeat_interleave(groups, 2)
    return k, v.float().contiguous()


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """`x [..., T, D]` of `system @ x = right`, with ones on the diagonal of the lower triangular
    `system [..., T, T]`."""
    if system.device.type == "cpu":
        return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return forward_substitution(system, right)


def forward_substitution(system: Tensor, right: Tensor) -> Tensor:
    """Solve as `torch.linalg.solve_triangular` does, with ones on the diagonal, row by row: for a
    few tokens, without the hundreds of megabytes that a GPU's solver takes.

    Args:
        system: `[..., T, T]`; only what is below the diagonal is read.
        right: `[..., T, D]`.

    Returns:
        `[..., T, D]`.
    """
    x = right.clone()
    for i in range(1, x.shape[-2]):
        x[..., i, :] -= (system[..., i : i + 1, :i] @ x[..., :i, :])[..., 0, :]
    return x
