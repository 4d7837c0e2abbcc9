"""The kernel of a step's table of entries against its twin."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels import context_table

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.attention.table import RequestSlots, fill_context_table
from sglang_dflash.drafting.kv.ring import RingKVCache
from tests.conftest import write_kv
from tests.kernels.support import DEVICE, GARBAGE, Canaries, counted_bytes

SLOTS = 64
REACHES = {"whole": Reach(), "window": Reach(5, 0), "sinks": Reach(5, 2)}
BATCHES = {"ragged": [7, 0, 12, 1], "single": [9], "no-context": [0, 0], "empty": []}


def ring_with(live: torch.Tensor) -> RingKVCache:
    """A ring of 40 entries in which the slots `live` are found, entry numbers not theirs."""
    ring = RingKVCache(40, SLOTS, (1, 2, 1, 2), torch.float32, DEVICE)
    write_kv(ring, live.flip(0), torch.randn(len(live), 1, 2, 1, 2, device=DEVICE))
    return ring


def empty_table(requests: int, columns: int) -> torch.Tensor:
    return torch.full((requests, columns), 77, dtype=torch.int32, device=DEVICE)


def batch(lengths: list[int], width: int = 14) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """req_to_token with two more rows than requests, rows out of order, lengths."""
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    rows = torch.arange(len(lengths), device=DEVICE).flip(0) + 1
    table = torch.full((len(lengths) + 2, width), GARBAGE, dtype=torch.int32, device=DEVICE)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length] = torch.randperm(SLOTS, device=DEVICE)[:length].int()
    return table, rows, seq_lens


@pytest.mark.parametrize("kind", ["ring", "no-tags"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("spare", [0, 3, 290], ids=["exact", "wider", "two-programs"])
def test_the_kernel_is_its_twin(lengths: list[int], reach: Reach, kind: str, spare: int) -> None:
    table, rows, seq_lens = batch(lengths)
    columns = max([*lengths, 1]) + spare
    ring = ring_with(torch.arange(0, SLOTS, 2, device=DEVICE)) if kind == "ring" else None
    canaries, outputs = Canaries(), []
    for run in (context_table.context_table, fill_context_table):
        entries = canaries.around(empty_table(len(lengths), columns))
        used = None
        if ring is not None:
            used = ring.tags._replace(in_use=canaries.around(torch.ones_like(ring.tags.in_use)))
        with counted_bytes() as count:
            run(entries, table, rows, seq_lens, reach, used)
        if run is context_table.context_table:
            dead = sum(reach.tokens_read(n) for n in lengths) - int((entries >= 0).sum())
            count.check(context_table.traffic(columns, lengths, reach, ring is not None, dead))
        outputs.append((entries, used))
    (entries, used), (expected, expected_used) = outputs
    assert torch.equal(entries, expected)
    if used is not None and expected_used is not None:
        assert torch.equal(used.in_use, expected_used.in_use)
    assert canaries.are_alive()


@pytest.mark.parametrize("kind", ["ring", "no-tags"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_torch_fills_it_piece_by_piece(
    reach: Reach, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows, seq_lens = batch([7, 0, 12, 1])
    ring = ring_with(torch.arange(0, SLOTS, 2, device=DEVICE)) if kind == "ring" else None
    outputs = []
    for piece in (1 << 16, 12, 1):
        monkeypatch.setattr("sglang_dflash.drafting.attention.table.PIECE", piece)
        entries = empty_table(4, 12)
        fill_context_table(entries, table, rows, seq_lens, reach, ring and ring.tags)
        outputs.append((entries, ring and ring.tags.in_use.clone()))
    for entries, in_use in outputs[1:]:
        assert torch.equal(entries, outputs[0][0])
        assert in_use is None or torch.equal(in_use, outputs[0][1])


def test_columns_of_a_table() -> None:
    """No wider than what the longest request reads, nor than the table of requests: near the
    context limit, a bound on lengths may exceed it."""
    table, rows, seq_lens = batch([7, 4])
    slots = RequestSlots(table, rows, seq_lens, longest=9)
    assert slots.columns(Reach()) == 9 and slots._replace(longest=99).columns(Reach()) == 14
    assert slots.columns(Reach(5, 2)) == 7 and slots.columns(Reach(50, 2)) == 9


def test_lengths_past_the_table_of_requests_stay_inside_it() -> None:
    """Near the context limit, reserved lengths may exceed its columns."""
    table, rows, _ = batch([4])
    table[:] = torch.arange(14, device=DEVICE)
    for run in (context_table.context_table, fill_context_table):
        entries = empty_table(1, 17)
        run(entries, table, rows, torch.tensor([17], device=DEVICE), Reach(), None)
        assert entries.tolist() == [[*range(14), -1, -1, -1]]


def test_a_strided_table_of_requests_is_refused() -> None:
    table, rows, seq_lens = batch([3])
    entries = empty_table(1, 3)
    with pytest.raises(ValueError, match=r"req_to_token: strides \(1, 3\)"):
        strided = table.t().contiguous().t()
        context_table.context_table(entries, strided, rows, seq_lens, Reach(), None)
