"""Block preparation, acceptance and recurrent recording against their twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import accept, prepare_block, record_inputs
from torch import Tensor

from sglang_dflash.drafting.ops import TorchOps
from tests.kernels.support import DEVICE, Canaries, counted_bytes, needs_interpreter

SIZES = pytest.mark.parametrize(
    ("requests", "block"), [(0, 4), (1, 2), (3, 7), (40, 16)], ids=["empty", "1x2", "3x7", "40x16"]
)


def ids(*shape: int, most: int = 9) -> Tensor:
    return torch.randint(most, shape, device=DEVICE)


@SIZES
def test_prepare_block(requests: int, block: int) -> None:
    bonus, seq_lens, canaries = ids(requests), ids(requests, most=300000), Canaries()
    empty = torch.full((requests, block), -7, dtype=torch.int64, device=DEVICE)
    got = canaries.around(empty), canaries.around(empty)
    expected = TorchOps().prepare_block(bonus, seq_lens, block, 248077)
    prepare_block.prepare_block(*got, bonus, seq_lens, 248077)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert canaries.are_alive()
    if requests:
        assert got[0][0].tolist() == [bonus[0].item()] + [248077] * (block - 1)


@needs_interpreter
def test_traffic_of_prepare_block() -> None:
    got = torch.empty(2, 40, 7, dtype=torch.int64)
    with counted_bytes() as count:
        prepare_block.prepare_block(got[0], got[1], ids(40), ids(40), 5)
    assert count.traffic == prepare_block.traffic(40, 7)


@SIZES
def test_accept(requests: int, block: int) -> None:
    # Few different tokens, so that every length occurs; and rows of wider matrices.
    drafted = ids(requests, block + 3, most=2)[:, 1 : block + 1]
    target = ids(requests, block, most=2)
    if requests:
        drafted[0, 1:] = target[0, :-1]  # all accepted
    if requests > 1:
        drafted[1] = -1  # as for a request that takes one token per step
    canaries, empty = Canaries(), torch.full((requests,), -7, device=DEVICE)
    got, expected = (canaries.around(empty), canaries.around(empty)), (empty, empty.clone())
    accept.accept(*got, drafted, target)
    accept.torch_accept(*expected, drafted, target)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert canaries.are_alive()
    if requests == 40:
        assert set(got[0].tolist()) >= {1, 2, 3, block}


@needs_interpreter
def test_traffic_of_accept() -> None:
    lengths, bonus = torch.empty(2, 3, dtype=torch.int64)
    with counted_bytes() as count:
        accept.accept(lengths, bonus, ids(3, 7), ids(3, 7))
    assert count.traffic == accept.traffic(3, 7)


# block, value heads, channels, width
LAYERS = {
    "small": (3, 2, 10, 4),
    "two-programs": (16, 3, 500, 4),
    "gates-are-more": (16, 70, 12, 2),
}


def recorded(
    requests: int, layer: tuple[int, int, int, int]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Buffers with 2 more rows than requests; inputs. Windows strided as SGLang's pool has them."""
    block, heads, channels, width = layer
    rows = requests + 2
    kept = torch.full((2, rows, block, heads), 9.0), torch.full((rows, channels, width - 1), 9.0)
    mixed = torch.randn(requests * block, 2 * heads + 1)
    conv = torch.randn(2 * rows, width - 1, channels).transpose(1, 2)
    slots = torch.randperm(2 * rows)[:rows]
    inputs = (mixed[:, :heads], mixed[:, heads : 2 * heads], conv, slots)
    floats = [x.to(DEVICE, torch.bfloat16) for x in (*kept, *inputs[:3])]
    return (floats[0], floats[1]), (floats[2], floats[3], floats[4], slots.to(DEVICE))


@pytest.mark.parametrize("requests", [0, 1, 4])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_record_inputs(layer: tuple[int, int, int, int], requests: int) -> None:
    kept, (a, b, conv, slots) = recorded(requests, layer)
    if requests > 1:
        slots[1] = -1  # a padding row of a graph
    canaries = Canaries()
    got = canaries.around(kept[0]), canaries.around(kept[1])
    expected = kept[0].clone(), kept[1].clone()
    record_inputs.record_inputs(*got, a, b, conv, slots)
    record_inputs.torch_record_inputs(*expected, a, b, conv, slots)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert canaries.are_alive()
    assert (got[0][:, requests:] == 9).all() and (got[1][requests:] == 9).all()
    if requests:
        assert torch.equal(got[0][1, 0].flatten(), b[: layer[0]].flatten())
        assert torch.equal(got[1][0], conv[slots[0]])


@needs_interpreter
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_traffic_of_record_inputs(layer: tuple[int, int, int, int]) -> None:
    kept, inputs = recorded(3, layer)
    with counted_bytes() as count:
        record_inputs.record_inputs(*kept, *inputs)
    assert count.traffic == record_inputs.traffic(3, *layer, 2)
