"""The fold kernel against its torch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_kernels import gated_delta_fold

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.core.recurrent import gated_delta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# key heads, value heads, key dim, value dim, conv width, block
SHAPES = {
    "demo": (3, 6, 32, 32, 4, 4),
    "one-head": (1, 1, 16, 16, 4, 3),
    "wide-values": (2, 4, 16, 48, 3, 3),
    "odd-keys": (1, 2, 24, 40, 2, 4),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_its_twin(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    heads, value_heads, key_dim, value_dim, width, block = shape
    channels, count, depth = 2 * heads * key_dim + value_heads * value_dim, block + 1, 2

    def some(*size: int) -> torch.Tensor:
        return torch.randn(depth, *size, device=DEVICE).to(dtype)

    layers = gated_delta.RecurrentLayers(
        some(channels, width), some(channels) if bias else None, "silu", some(value_heads).float(), some(value_heads),
        heads, value_heads, key_dim, value_dim,
    )  # fmt: skip
    # Slots out of order and more of them than requests; blocks out of order; strided, as SGLang's windows are.
    states = torch.randn(depth, 2 * count + 1, value_heads, value_dim, key_dim, device=DEVICE)
    rows, lengths = torch.arange(count, device=DEVICE).flip(0), torch.arange(count, device=DEVICE)
    source, target = 2 * lengths + 1, torch.where(lengths % 2 == 0, 2 * lengths, 2 * lengths + 1)
    # One of them is wanted nowhere.
    target[2] = -1
    a, b = (some(count, block, value_heads) * 4 for _ in range(2))
    inputs = some(count, channels, block).transpose(2, 3)
    kept = gated_delta.VerifyInputs(some(count, channels, width - 1), inputs, a, b)
    # What was not accepted must not be read into the state.
    refused = lengths[:, None] <= torch.arange(block, device=DEVICE)
    poisoned = inputs.masked_fill(refused[rows][None, :, :, None], float("nan"))
    got, expected = states.clone(), states.clone()
    gated_delta_fold.fold_(
        layers, got, kept._replace(inputs=poisoned), rows, source, target, lengths
    )
    gated_delta.fold_(layers, expected, kept, rows, source, target, lengths)
    # float32 sums in another order; in bfloat16 one rounding of a convolved input may fall the other way (2^-8 of a value near 4).
    tolerance = 3e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    untouched = [i for i in range(2 * count + 1) if i not in target.tolist()]
    assert torch.equal(got[:, untouched], states[:, untouched]) and torch.equal(
        got[:, 0], states[:, 1]
    )


def test_another_activation_is_refused() -> None:
    layers = gated_delta.RecurrentLayers(
        torch.ones(1, 3, 2), None, "silu", torch.ones(1, 1), torch.ones(1, 1), 1, 1, 1, 1
    )
    nothing = torch.ones(1)
    with pytest.raises(ConfigError, match="activation: 'gelu'"):
        gated_delta_fold.fold_(
            replace(layers, activation="gelu"),
            nothing,
            gated_delta.VerifyInputs(*[nothing] * 4),
            *(nothing for _ in range(4)),
        )
