"""Folding accepted tokens into a recurrent state, against the recurrence one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash.drafting.recurrent.replay import (
    Moves,
    RecurrentLayers,
    VerifyInputs,
    fold_,
    forward_substitution,
)

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, BLOCK, DEPTH = 2, 4, 8, 6, 4, 5, 3
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def random_layers(bias: bool) -> RecurrentLayers:
    return RecurrentLayers(
        conv_weight=torch.randn(DEPTH, CHANNELS, WIDTH),
        conv_bias=torch.randn(DEPTH, CHANNELS) if bias else None,
        activation="silu",
        a_log=torch.randn(DEPTH, VALUE_HEADS),
        dt_bias=torch.randn(DEPTH, VALUE_HEADS),
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
    )


def one_token(
    layers: RecurrentLayers,
    i: int,
    window: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Advance `state` [HV, V, K] and `window` [C, W - 1] of one request in layer `i` by a token."""
    history = torch.cat([window, x[:, None]], 1)
    mixed = (history * layers.conv_weight[i]).sum(1)
    if layers.conv_bias is not None:
        mixed = mixed + layers.conv_bias[i]
    mixed = mixed / (1 + torch.exp(-mixed))
    window.copy_(history[:, 1:])
    for head in range(VALUE_HEADS):
        at = KEY_HEADS * KEY_DIM + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        k = mixed[at : at + KEY_DIM]
        k = k / math.sqrt(float((k * k).sum()) + 1e-6)
        v = mixed[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM :][:VALUE_DIM]
        decay = math.exp(
            -math.exp(float(layers.a_log[i, head]))
            * math.log1p(math.exp(float(a[head] + layers.dt_bias[i, head])))
        )
        beta = 1 / (1 + math.exp(-float(b[head])))
        now = state[head] * decay
        state[head] = now + beta * torch.outer(v - now @ k, k)


def test_every_accepted_length_gives_the_state_of_that_many_steps() -> None:
    for bias in (False, True):
        layers, lengths = random_layers(bias), torch.arange(BLOCK + 1)
        count = len(lengths)
        kept = VerifyInputs(
            window=torch.randn(DEPTH, count, CHANNELS, WIDTH - 1),
            inputs=torch.randn(DEPTH, count, BLOCK, CHANNELS),
            a=torch.randn(DEPTH, count, BLOCK, VALUE_HEADS),
            b=torch.randn(DEPTH, count, BLOCK, VALUE_HEADS),
        )
        before = torch.randn(DEPTH, 2 * count, VALUE_HEADS, VALUE_DIM, KEY_DIM)
        states, rows, slots_before = before.clone(), lengths.flip(0), 2 * lengths
        # Even lengths in place, odd ones into another slot.
        slots_after = slots_before + lengths % 2
        # One row is skipped.
        slots_after[3] = -1
        fold_(layers, states, kept, Moves(rows, slots_before, slots_after, lengths))
        for length, row, at, to in zip(
            *(t.tolist() for t in (lengths, rows, slots_before, slots_after)), strict=True
        ):
            for i in range(DEPTH) if to >= 0 else ():
                expected, history = before[i, at].clone(), kept.window[i, row].clone()
                for t in range(length):
                    x, a, b = (kept_at[i, row, t] for kept_at in (kept.inputs, kept.a, kept.b))
                    one_token(layers, i, history, x, a, b, expected)
                # float32, five tokens: only the order of sums differs.
                torch.testing.assert_close(states[i, to], expected, atol=3e-5, rtol=3e-5)
        untouched = [i for i in range(2 * count) if i not in slots_after.tolist()]
        assert torch.equal(states[:, untouched], before[:, untouched])
        # Length 0, in place.
        assert torch.equal(states[:, 0], before[:, 0])


def test_what_follows_the_accepted_tokens_leaves_nothing() -> None:
    """After a narrow step, it is another request's: its numbers may be infinite or none."""
    lengths = torch.arange(1, BLOCK)
    count = len(lengths)
    clean = VerifyInputs(
        window=torch.randn(DEPTH, count, CHANNELS, WIDTH - 1),
        inputs=torch.randn(DEPTH, count, BLOCK, CHANNELS),
        a=torch.randn(DEPTH, count, BLOCK, VALUE_HEADS),
        b=torch.randn(DEPTH, count, BLOCK, VALUE_HEADS),
    )
    rows = torch.arange(count)
    layers, moves = random_layers(bias=True), Moves(rows, rows, rows, lengths)
    expected = torch.randn(DEPTH, count, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    states = expected.clone()
    fold_(layers, expected, clean, moves)
    behind = torch.arange(BLOCK) >= lengths[:, None]
    for value in (torch.nan, torch.inf):
        broken = [x.masked_fill(behind[..., None], value) for x in clean[1:]]
        now = states.clone()
        fold_(layers, now, VerifyInputs(clean.window, *broken), moves)
        torch.testing.assert_close(now, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 5)], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2, 3), (7, 5), (16, 9), (33, 1)])
def test_a_gpu_substitutes_what_a_cpu_solves(
    batch: tuple[int, ...], tokens: int, width: int
) -> None:
    """The diagonal and what is above it are not read, and the right side is left as it is."""
    system = torch.randn(*batch, tokens, tokens, dtype=torch.float64) / tokens
    right = torch.randn(*batch, tokens, width, dtype=torch.float64)
    before = right.clone()
    expected = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    torch.testing.assert_close(forward_substitution(system, right), expected, rtol=0, atol=1e-12)
    transposed = system.mT.contiguous().mT
    torch.testing.assert_close(
        forward_substitution(transposed, right), expected, rtol=0, atol=1e-12
    )
    assert torch.equal(right, before)
