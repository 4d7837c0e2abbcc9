"""The convolution before the recurrence against Transformers' Qwen3.5."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.plugins.platform_cpu.gdn_ops import conv as ours
from tests.plugins.platform_cpu.gdn_cases import (
    BLOCK,
    CHANNELS,
    CLOSE,
    SLOTS,
    WIDTH,
    bounds_of,
    conv_pool,
    convolution,
    convolved,
)


def test_convolution_of_a_ragged_prefill() -> None:
    lengths, slots, known = (
        [1, 70, 2, 9, 3, 1],
        [5, 0, 1, -1, 4, 2],
        [True, False, True, False, True, False],
    )
    (weight, bias), x, bounds = (
        convolution(),
        torch.randn(sum(lengths) + 2, CHANNELS),
        bounds_of(lengths),
    )
    # The slots of requests without a past hold NaN.
    pool = conv_pool([5, 1, 4])
    before = pool.clone()
    out = ours.causal_conv1d_fn(
        x.T, weight, bias, activation="silu", conv_states=pool,
        has_initial_state=torch.tensor(known), query_start_loc=bounds,
        cache_indices=torch.tensor(slots).int(), seq_lens_cpu=lengths,
    ).T  # fmt: skip
    # Callers split it by channel and view the parts as heads.
    assert out.is_contiguous() and out.shape == x.shape
    for slot, old, start, end in zip(
        slots, known, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
    ):
        if slot < 0:
            assert out[start:end].count_nonzero() == 0
            continue
        history = before[slot] if old else torch.zeros(CHANNELS, WIDTH - 1)
        torch.testing.assert_close(
            out[start:end], convolved(x[start:end], history, weight, bias), **CLOSE
        )
        assert torch.equal(pool[slot], torch.cat([history, x[start:end].T], 1)[:, 1 - WIDTH :])
    assert pool[[3, 6]].isnan().all()


@pytest.mark.parametrize("shared", [True, False], ids=["windows-share-memory", "windows-apart"])
def test_convolution_of_a_verified_block(shared: bool) -> None:
    """Bitwise equal to decoding token by token; the state stays, every window is kept."""
    (weight, bias), slots = convolution(), torch.tensor([2, -1, 6], dtype=torch.int32)
    x, pool = torch.randn(3, BLOCK, CHANNELS), conv_pool([2, 6])
    before = pool.clone()
    if shared:
        memory = torch.full((SLOTS, CHANNELS, BLOCK + WIDTH - 2), float("nan"))
        windows = memory.as_strided(
            (SLOTS, BLOCK, CHANNELS, WIDTH - 1), (memory.stride(0), 1, memory.stride(1), 1)
        )
    else:
        windows = torch.full((SLOTS, BLOCK, CHANNELS, WIDTH - 1), float("nan"))
    out = ours.causal_conv1d_update(
        x.transpose(1, 2), pool, weight, bias, "silu", conv_state_indices=slots,
        intermediate_conv_window=windows, intermediate_state_indices=torch.tensor([0, 1, 4]),
        retrieve_next_token=None,
    ).transpose(1, 2)  # fmt: skip
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
    assert out.view(3 * BLOCK, -1).shape == (3 * BLOCK, CHANNELS) and out[1].count_nonzero() == 0
    torch.testing.assert_close(out[0], convolved(x[0], before[2], weight, bias), **CLOSE)
    for t in range(BLOCK):
        step = ours.causal_conv1d_update(
            x[:, t], pool, weight, bias, "silu", conv_state_indices=slots
        )
        assert torch.equal(step, out[:, t])
        assert torch.equal(windows[0, t], pool[2]) and torch.equal(windows[4, t], pool[6])
    assert pool[[0, 1, 3, 4, 5]].isnan().all() and windows[[1, 2, 3, 5, 6]].isnan().all()
