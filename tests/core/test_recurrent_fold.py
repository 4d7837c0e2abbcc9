"""Folding a block's accepted tokens into a recurrent state, against the recurrence written out token by token."""

from __future__ import annotations

import math

import torch

from sglang_dflash.core.gated_delta import RecurrentLayer, fold

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, BLOCK = 2, 4, 8, 6, 4, 5
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def layer_of(bias: bool) -> RecurrentLayer:
    return RecurrentLayer(
        conv_weight=torch.randn(CHANNELS, WIDTH),
        conv_bias=torch.randn(CHANNELS) if bias else None,
        activation="silu",
        a_log=torch.randn(VALUE_HEADS),
        dt_bias=torch.randn(VALUE_HEADS),
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
    )


def one_token(layer: RecurrentLayer, window: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> None:
    """Moves `state` [HV, V, K] and `window` [C, W - 1] of one request on by one token, head by head."""
    history = torch.cat([window, x[:, None]], 1)
    mixed = (history * layer.conv_weight).sum(1) + (0 if layer.conv_bias is None else layer.conv_bias)
    mixed = mixed / (1 + torch.exp(-mixed))
    window.copy_(history[:, 1:])
    for head in range(VALUE_HEADS):
        at = KEY_HEADS * KEY_DIM + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        k = mixed[at : at + KEY_DIM]
        k = k / math.sqrt(float((k * k).sum()) + 1e-6)
        v = mixed[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM :][:VALUE_DIM]
        decay = math.exp(-math.exp(float(layer.a_log[head])) * math.log1p(math.exp(float(a[head] + layer.dt_bias[head]))))
        beta = 1 / (1 + math.exp(-float(b[head])))
        now = state[head] * decay
        state[head] = now + beta * torch.outer(v - now @ k, k)


def test_every_accepted_length_gives_the_state_of_that_many_steps() -> None:
    for bias in (False, True):
        layer, lengths = layer_of(bias), torch.arange(BLOCK + 1)
        count = len(lengths)
        window, inputs = torch.randn(count, CHANNELS, WIDTH - 1), torch.randn(count, BLOCK, CHANNELS)
        a, b = torch.randn(count, BLOCK, VALUE_HEADS), torch.randn(count, BLOCK, VALUE_HEADS)
        state = torch.randn(count, VALUE_HEADS, VALUE_DIM, KEY_DIM)
        got = fold(layer, window, inputs, a, b, state, lengths)
        for r, length in enumerate(lengths.tolist()):
            expected, history = state[r].clone(), window[r].clone()
            for t in range(length):
                one_token(layer, history, inputs[r, t], a[r, t], b[r, t], expected)
            # float32, five tokens: the two differ by the order of sums only.
            torch.testing.assert_close(got[r], expected, atol=2e-5, rtol=2e-5)
        assert torch.equal(got[0], state[0]), "nothing accepted: the state to the bit"
