"""Block preparation and acceptance against their twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import accept, prepare_block
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
    got = canaries.around(empty), canaries.around(empty)
    accept.accept(*got, drafted, target)
    expected = TorchOps().accept(drafted, target)
    assert torch.equal(got[0], expected.lengths) and torch.equal(got[1], expected.bonus)
    assert canaries.are_alive()
    if requests == 40:
        assert set(got[0].tolist()) >= {1, 2, 3, block}


@needs_interpreter
def test_traffic_of_accept() -> None:
    lengths, bonus = torch.empty(2, 3, dtype=torch.int64)
    with counted_bytes() as count:
        accept.accept(lengths, bonus, ids(3, 7), ids(3, 7))
    assert count.traffic == accept.traffic(3, 7)
