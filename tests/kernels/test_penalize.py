"""Penalties of a block against their twin, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from dflash_kernels import penalize
from torch import Tensor

from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.penalties import Penalties, Penalty, Stops
from tests.kernels.support import DEVICE, Canaries, counted_bytes

# Two whole programs and a part of one.
WIDTH = 2 * penalize.BLOCK + 77
ENDS = 5, 9, penalize.BLOCK
NAMES = Penalties._fields
# Kinds of penalties: each alone, one of them with each of the others, and all.
KINDS = [{name} for name in NAMES] + [{NAMES[0], NAMES[1]}, {NAMES[2], NAMES[3]}, {*NAMES}]
# Requests of a batch: which of its kinds they have, up to all; the fourth has none.
HAS = [{*NAMES}, {"presence", "stops"}, {"frequency", "repetition"}, set()]
LEAST = 3


def penalties_of(kinds: set[str], requests: int, width: int) -> Penalties:
    """Penalties behind some output. The fourth request's are neutral."""
    wrote = torch.randint(4, (requests, width), device=DEVICE)

    def has(name: str) -> Tensor:
        rows = [name in HAS[row % len(HAS)] for row in range(requests)]
        return torch.tensor(rows, dtype=torch.bool, device=DEVICE)[:, None]

    def penalty(name: str, neutral: float, adds_up: bool) -> Penalty | None:
        if name not in kinds:
            return None
        per_token = (0.3 + torch.rand(requests, 1, device=DEVICE)).where(has(name), neutral)
        so_far = torch.full((requests, width), neutral, device=DEVICE)
        for count in range(1, 4 if adds_up else 2):
            more = so_far + per_token if adds_up else per_token
            so_far = more.where(wrote >= count, so_far)
        return Penalty(so_far, per_token)

    stops = None
    if "stops" in kinds:
        # As SGLang makes it, with a column more.
        table = torch.zeros(requests, width + 1, device=DEVICE)
        table[:, [end for end in ENDS if end < width]] = -torch.inf
        lengths = torch.full((requests, 1), 20, dtype=torch.int32, device=DEVICE)
        # Of the last one, no position behind the first is held.
        least = 20 + torch.where(has("stops"), LEAST, 1).int()
        stops = Stops(table[:, :width], least, lengths)
    return Penalties(
        penalty("frequency", 0.0, True), penalty("presence", 0.0, False),
        penalty("repetition", 1.0, False), stops,
    )  # fmt: skip


def block_of(requests: int, positions: int, width: int) -> Tensor:
    """Drafts that repeat each other, stop tokens, and the last column. Rows of a wider block."""
    drafts = torch.tensor([5, 7, 7, 2, width - 1, 7, penalize.BLOCK, 2, 5], device=DEVICE)
    rows = [drafts.roll(row).repeat(3)[: positions + 3] for row in range(requests)]
    return torch.stack(rows)[:, 1 : positions + 1]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(sorted(kinds)))
def test_every_kind(kinds: set[str], dtype: torch.dtype) -> None:
    requests, positions = 5, 4
    penalties, block = penalties_of(kinds, requests, WIDTH), block_of(requests, positions, WIDTH)
    logits = (9 * torch.randn(requests, positions, WIDTH, device=DEVICE)).to(dtype)
    # Near 0 a sum shows its roundings; and logits that a grammar or a target has.
    logits[..., :20] /= 30
    logits[..., 30] = -torch.inf
    logits[..., 31] = torch.inf
    logits[..., 32] = -0.0
    before, canaries = [x and [y.clone() for y in x] for x in penalties], Canaries()
    got, expected = canaries.around(logits), logits.clone()
    TorchOps().penalize(expected, block, penalties)
    with counted_bytes() as counted:
        penalize.penalize(got, block, penalties)
    tables = [len(kinds & HAS[row % len(HAS)]) for row in range(requests)]
    present = [name in kinds for name in NAMES]
    counted.check(penalize.traffic(tuple(logits.shape), dtype.itemsize, present, tables))
    assert canaries.are_alive()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    # The first position, and a request without penalties, also keep the sign of a zero.
    for same in (got[:, 0], logits[:, 0]), (got[3], logits[3]):
        assert torch.equal(*map(bits, (same[0].contiguous(), same[1].contiguous())))
    assert not torch.equal(got[0, 1:], logits[0, 1:])
    if kinds == {"stops"}:
        assert (got[0, 1:LEAST, ENDS] == -torch.inf).all() and (got[0, LEAST, ENDS] > -99).all()
    after = itertools.chain.from_iterable(x or () for x in penalties)
    tables_before = itertools.chain.from_iterable(x or () for x in before)
    assert all(map(torch.equal, after, tables_before))


@pytest.mark.parametrize(("requests", "positions", "width"), [(1, 2, 50), (9, 3, 300), (2, 16, 40)])
def test_batches_and_blocks_of_any_size(requests: int, positions: int, width: int) -> None:
    """Logits that are a part of wider rows, as of a padded lm_head."""
    penalties = penalties_of({*NAMES}, requests, width)
    block = block_of(requests, positions, width) % width
    logits = torch.randn(requests * positions, width + 8, device=DEVICE)
    got, expected = logits.clone(), logits.clone()
    shape = requests, positions
    penalize.penalize(got[:, :width].unflatten(0, shape), block, penalties)
    TorchOps().penalize(expected[:, :width].unflatten(0, shape), block, penalties)
    assert torch.equal(got, expected) and not torch.equal(got, logits)


def test_nothing_to_penalize() -> None:
    """No requests, and a block without drafts."""
    for requests, positions in ((0, 4), (2, 1)):
        penalties = penalties_of({*NAMES}, requests, 9)
        logits = torch.ones(requests, positions, 9, device=DEVICE)
        block = torch.zeros(requests, positions, dtype=torch.int64, device=DEVICE)
        penalize.penalize(logits, block, penalties)
        assert (logits == 1).all()


def test_a_table_that_is_not_dense_is_refused() -> None:
    wide, per_token = torch.zeros(2, 10, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    penalties = Penalties(presence=Penalty(wide[:, :9], per_token))
    logits = torch.zeros(2, 2, 9, device=DEVICE)
    with pytest.raises(ValueError, match=r"presence: strides \(10, 1\)"):
        penalize.penalize(logits, torch.zeros(2, 2, device=DEVICE).long(), penalties)
