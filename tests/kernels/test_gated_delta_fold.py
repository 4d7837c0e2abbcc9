"""The fold kernel against its torch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_kernels import gated_delta_fold

from sglang_dflash.config import ConfigError
from sglang_dflash.core import gated_delta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# key heads, value heads, key dim, value dim, conv width, block
SHAPES = {
    "demo": (3, 6, 32, 32, 4, 8),
    "one-head": (1, 1, 16, 16, 4, 3),
    "wide-values": (2, 4, 16, 48, 3, 5),
    "odd-keys": (1, 2, 24, 40, 2, 4),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_its_twin(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    heads, value_heads, key_dim, value_dim, width, block = shape
    channels, count = 2 * heads * key_dim + value_heads * value_dim, block + 1

    def some(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE).to(dtype)

    layer = gated_delta.RecurrentLayer(
        some(channels, width), some(channels) if bias else None, "silu", some(value_heads).float(), some(value_heads),
        heads, value_heads, key_dim, value_dim,
    )  # fmt: skip
    a, b = some(2, count, block, value_heads) * 4
    state = torch.randn(count, value_heads, value_dim, key_dim, device=DEVICE)
    arguments = layer, some(count, channels, width - 1), some(count, block, channels), a, b, state
    lengths = torch.arange(count, device=DEVICE)
    poisoned = arguments[2].clone()
    # What was not accepted must not be read into the state.
    poisoned[lengths[:, None] <= torch.arange(block, device=DEVICE)] = float("nan")
    got = gated_delta_fold.fold(*arguments[:2], poisoned, *arguments[3:], lengths)
    expected = gated_delta.fold(*arguments, lengths)
    # float32 sums in another order; in bfloat16 one rounding of a convolved input may fall the other way (2^-8 of a value near 4).
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(got[0], state[0])


def test_another_activation_is_refused() -> None:
    layer = gated_delta.RecurrentLayer(torch.ones(3, 2), None, "silu", torch.ones(1), torch.ones(1), 1, 1, 1, 1)
    with pytest.raises(ConfigError, match="activation: 'gelu'"):
        gated_delta_fold.fold(replace(layer, activation="gelu"), *(torch.ones(1) for _ in range(6)))
