"""Block preparation and acceptance against their twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import accept, prepare_block
from torch import Tensor

from sglang_dflash.drafting.ops import TorchOps
from tests.kernels.support import DEVICE, Canaries, counted_bytes

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
    with counted_bytes() as count:
        prepare_block.prepare_block(*got, bonus, seq_lens, 248077)
    count.check(prepare_block.traffic(requests, block))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert canaries.are_alive()
    if requests:
        assert got[0][0].tolist() == [bonus[0].item()] + [248077] * (block - 1)


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
    with counted_bytes() as count:
        accept.accept(*got, drafted, target)
    count.check(accept.traffic(requests, block))
    expected = TorchOps().accept(drafted, target)
    assert torch.equal(got[0], expected.lengths) and torch.equal(got[1], expected.bonus)
    assert canaries.are_alive()
    if requests == 40:
        assert set(got[0].tolist()) >= {1, 2, 3, block}
