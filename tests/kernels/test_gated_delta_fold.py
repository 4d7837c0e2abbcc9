"""The fold kernel against its torch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_kernels import gated_delta_fold

from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.drafting.self_check import check_replay
from tests.errors import refused
from tests.kernels.support import DEVICE, counted_bytes, needs_interpreter

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
    slots = 3 * count + 1
    states = torch.randn(depth, slots, value_heads, value_dim, key_dim, device=DEVICE)
    rows, lengths = torch.arange(count, device=DEVICE).flip(0), torch.arange(count, device=DEVICE)
    before = 2 * lengths + 1
    after = torch.where(lengths % 2 == 0, 2 * lengths, before)
    # One row is skipped. The last two have a checkpoint: in the block, and at its end.
    after[2] = -1
    checkpoints = (slots - lengths.flip(0) - 1).where(lengths >= count - 2, -1)
    steps = (lengths - (lengths == count - 2).long()).clamp(min=1)
    moves = replay.Moves(rows, before, after, lengths, checkpoints, steps)
    a, b = (some(count, block, value_heads) * 4 for _ in range(2))
    inputs = some(count, channels, block).transpose(2, 3)
    kept = replay.VerifyInputs(some(count, channels, width - 1), inputs, a, b)
    # Rejected tokens must not reach the state.
    refused = lengths[:, None] <= torch.arange(block, device=DEVICE)
    poisoned = inputs.masked_fill(refused[rows][None, :, :, None], float("nan"))
    got, expected = states.clone(), states.clone()
    gated_delta_fold.fold_(layers, got, kept._replace(inputs=poisoned), moves)
    replay.fold_(layers, expected, kept, moves)
    # float32: another order of sums. bfloat16: a convolved input near 4 may round the other way, by
    # 2^-8 of its value.
    tolerance = 3e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    untouched = set(range(slots)) - {*after.tolist(), *checkpoints.tolist()}
    assert torch.equal(got[:, sorted(untouched)], states[:, sorted(untouched)])
    # Length 0, from slot 1 to slot 0.
    assert torch.equal(got[:, 0], states[:, 1])
    # Without checkpoints the same, but for their slots.
    plain = states.clone()
    gated_delta_fold.fold_(layers, plain, kept, moves._replace(checkpoints=None, steps=None))
    due = checkpoints[checkpoints >= 0]
    assert len(due) == 2 and torch.equal(plain[:, due], states[:, due])
    others = sorted(set(range(slots)) - set(due.tolist()))
    assert torch.equal(plain[:, others], got[:, others])


@pytest.mark.parametrize("channels_last", [False, True])
def test_windows_are_moved_as_by_the_twin(channels_last: bool) -> None:
    depth, count, block, channels, kept = 2, 4, 3, 1100, 3
    pool = torch.randn(depth, 9, channels, kept, device=DEVICE).bfloat16()
    if channels_last:
        pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
    # As SGLang lays them out, each window begins one input after the one before.
    inputs = torch.randn(depth, count, channels, block + kept, device=DEVICE).bfloat16()
    windows = inputs.unfold(3, kept, 1)[:, :, :, 1:].permute(0, 1, 3, 2, 4)
    rows = torch.arange(count, device=DEVICE).flip(0)
    after, lengths, checkpoints, steps = (
        torch.tensor(x, device=DEVICE)
        for x in ([5, -1, 2, 0], [3, 2, 1, 3], [-1, 7, 8, 6], [0, 1, 1, 2])
    )
    moves = replay.Moves(rows, after, after, lengths, checkpoints, steps)
    for given in (moves, moves._replace(checkpoints=None, steps=None)):
        got, expected = pool.clone(), pool.clone()
        with counted_bytes() as bytes_:
            gated_delta_fold.move_windows_(got, windows, given)
        replay.move_windows_(expected, windows, given)
        assert torch.equal(got, expected) and not torch.equal(got, pool)
        due = None if given.steps is None else 2
        # The skipped row reads its slot after.
        skipped = gated_delta_fold.Traffic(depth * 8 * 2, 0)
        bytes_.check(gated_delta_fold.window_traffic(pool, 3, due) + skipped)


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
    moves = replay.Moves(rows, rows, rows, torch.tensor(lengths))
    with counted_bytes() as count:
        gated_delta_fold.fold_(layers, states, kept, moves)
    assert count.traffic == gated_delta_fold.traffic(layers, states, kept, lengths)
    states = torch.cat((states, states), 1)
    moves = moves._replace(checkpoints=torch.tensor([4, -1, 5]), steps=torch.tensor([1, 0, 3]))
    with counted_bytes() as count:
        gated_delta_fold.fold_(layers, states, kept, moves)
    assert count.traffic == gated_delta_fold.traffic(layers, states, kept, lengths, checkpoints=2)


def test_another_activation_is_refused() -> None:
    layers = replay.RecurrentLayers(
        torch.ones(1, 3, 2), None, "silu", torch.ones(1, 1), torch.ones(1, 1), 1, 1, 1, 1
    )
    nothing = torch.ones(1)
    with refused("activation", "gelu"):
        gated_delta_fold.fold_(
            replace(layers, activation="gelu"),
            nothing,
            replay.VerifyInputs(*[nothing] * 4),
            replay.Moves(*[nothing] * 4),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_start_up_check_finds_it_right(dtype: torch.dtype) -> None:
    conv = torch.empty(1, 3, 2 * 2 * 8 + 4 * 16, 3, device=DEVICE, dtype=dtype)
    states = torch.empty(1, 3, 4, 16, 8, device=DEVICE)
    check_replay(gated_delta_fold.fold_, gated_delta_fold.move_windows_, conv, states)
