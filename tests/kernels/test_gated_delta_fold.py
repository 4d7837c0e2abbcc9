"""The fold kernel against its torch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_kernels import gated_delta_fold

from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.facts.errors import ConfigError
from tests.kernels.support import counted_bytes, needs_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# key heads, value heads, key dim, value dim, conv width, block
SHAPES = {
    "grouped": (2, 4, 8, 8, 4, 3),
    "one-head": (1, 1, 16, 16, 4, 4),
    "two-value-tiles": (1, 1, 8, 32, 3, 3),
    "odd-sizes": (1, 2, 12, 20, 2, 3),
}


@pytest.mark.parametrize(
    ("name", "dtype", "bias"),
    [
        *((name, torch.float32, False) for name in SHAPES),
        ("grouped", torch.float32, True),
        ("grouped", torch.bfloat16, False),
        ("odd-sizes", torch.bfloat16, True),
    ],
    ids=str,
)
def test_the_kernel_is_its_twin(name: str, dtype: torch.dtype, bias: bool) -> None:
    shape = SHAPES[name]
    heads, value_heads, key_dim, value_dim, width, block = shape
    channels, count, depth = 2 * heads * key_dim + value_heads * value_dim, block + 1, 2

    def some(*size: int) -> torch.Tensor:
        return torch.randn(depth, *size, device=DEVICE).to(dtype)

    layers = replay.RecurrentLayers(
        conv_weight=some(channels, width),
        conv_bias=some(channels) if bias else None,
        activation="silu",
        a_log=some(value_heads).float(),
        dt_bias=some(value_heads),
        key_heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    # Slots and blocks out of order, more slots than requests, strided as SGLang's windows are.
    states = torch.randn(depth, 2 * count + 1, value_heads, value_dim, key_dim, device=DEVICE)
    rows, lengths = torch.arange(count, device=DEVICE).flip(0), torch.arange(count, device=DEVICE)
    source, target = 2 * lengths + 1, torch.where(lengths % 2 == 0, 2 * lengths, 2 * lengths + 1)
    # One row is skipped.
    target[2] = -1
    a, b = (some(count, block, value_heads) * 4 for _ in range(2))
    inputs = some(count, channels, block).transpose(2, 3)
    kept = replay.VerifyInputs(some(count, channels, width - 1), inputs, a, b)
    # Rejected tokens must not reach the state.
    refused = lengths[:, None] <= torch.arange(block, device=DEVICE)
    poisoned = inputs.masked_fill(refused[rows][None, :, :, None], float("nan"))
    got, expected = states.clone(), states.clone()
    gated_delta_fold.fold_(
        layers, got, kept._replace(inputs=poisoned), rows, source, target, lengths
    )
    replay.fold_(layers, expected, kept, rows, source, target, lengths)
    # float32: another order of sums. bfloat16: a convolved input near 4 may round the other way, by
    # 2^-8 of its value.
    tolerance = 3e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    untouched = [i for i in range(2 * count + 1) if i not in target.tolist()]
    assert torch.equal(got[:, untouched], states[:, untouched])
    # Length 0, from slot 1 to slot 0.
    assert torch.equal(got[:, 0], states[:, 1])


@needs_interpreter
def test_traffic() -> None:
    heads, value_heads, key_dim, value_dim, width, block = SHAPES["odd-sizes"]
    channels = 2 * heads * key_dim + value_heads * value_dim
    layers = replay.RecurrentLayers(
        torch.randn(2, channels, width).bfloat16(), torch.randn(2, channels), "silu",
        torch.randn(2, value_heads), torch.randn(2, value_heads).bfloat16(),
        heads, value_heads, key_dim, value_dim,
    )  # fmt: skip
    rows, states = torch.arange(3), torch.randn(2, 3, value_heads, value_dim, key_dim)
    a = torch.randn(2, 3, block, value_heads).bfloat16()
    inputs = torch.randn(2, 3, block, channels).bfloat16()
    window = torch.randn(2, 3, channels, width - 1).bfloat16()
    kept, lengths = replay.VerifyInputs(window, inputs, a, a), [2, 0, 3]
    with counted_bytes() as count:
        gated_delta_fold.fold_(layers, states, kept, rows, rows, rows, torch.tensor(lengths))
    assert count.traffic == gated_delta_fold.traffic(layers, states, kept, lengths)


def test_another_activation_is_refused() -> None:
    layers = replay.RecurrentLayers(
        torch.ones(1, 3, 2), None, "silu", torch.ones(1, 1), torch.ones(1, 1), 1, 1, 1, 1
    )
    nothing = torch.ones(1)
    with pytest.raises(ConfigError, match="computes silu") as refused:
        gated_delta_fold.fold_(
            replace(layers, activation="gelu"),
            nothing,
            replay.VerifyInputs(*[nothing] * 4),
            *(nothing for _ in range(4)),
        )
    assert (refused.value.field, refused.value.value) == ("activation", "gelu")
