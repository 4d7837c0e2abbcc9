"""What our worker does to SGLang's batch: a forward's preparation leaves it as it was, even if it
fails; and KV slots are reserved anew only if a block might not fit in what is reserved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dflash.serving.step import batch as ours

BLOCK = 8


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_a_verify_forward_leaves_the_lengths_as_they_were(
    on_host: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparation counts the block in; without host lengths it has what is reserved."""
    reserved = SimpleNamespace(nxt_kv_lens_cpu=torch.tensor([13, 17]), nxt_kv_lens_sum=30)
    batch: Any = SimpleNamespace(
        seq_lens_cpu=torch.tensor([5, 9]) if on_host else None,
        seq_lens_sum=14 if on_host else None,
        out_cache_loc=None,
        spec_info=reserved,
    )
    before, found = (batch.seq_lens_cpu, batch.seq_lens_sum), []

    def prepare_for_verify(_self: Any, batch: Any, _worker: Any) -> tuple[str, None]:
        found.append((batch.seq_lens_cpu.tolist(), batch.seq_lens_sum))
        if fails:
            raise RuntimeError("no memory")
        return "forward", None

    monkeypatch.setattr(ours.DFlashVerifyInput, "prepare_for_verify", prepare_for_verify)
    block = torch.zeros(2, 4, dtype=torch.int64)
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            ours.verify_batch(batch, None, block, block, block)
    else:
        assert ours.verify_batch(batch, None, block, block, block) == "forward"
    assert found == [([9, 13], 22) if on_host else ([13, 17], 30)]
    assert batch.seq_lens_cpu is before[0] and batch.seq_lens_sum == before[1]


class Reservations:
    """Stands in for SGLang's method, which reserves two blocks after the known lengths."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        spec = SimpleNamespace(speculative_num_draft_tokens=BLOCK)
        monkeypatch.setattr(ours, "get_spec", lambda: spec)
        monkeypatch.setattr(
            ours.DFlashDraftInputV2, "prepare_for_decode", lambda _, batch: self.reserve(batch)
        )

    def reserve(self, batch: Any) -> None:
        self.count += 1
        for request in batch.reqs:
            kv = request.kv
            kv.kv_allocated_len = max(kv.kv_allocated_len, kv.kv_committed_len + 2 * BLOCK)


def running_batch(committed: list[int], allocated: list[int], overlap: bool = True) -> Any:
    requests = [
        SimpleNamespace(
            kv=SimpleNamespace(kv_committed_len=known, kv_allocated_len=reserved),
            sampling_params=SimpleNamespace(top_k=top_k),
            decode_batch_idx=3,
        )
        for known, reserved, top_k in zip(committed, allocated, (5, 7), strict=False)
    ]
    return SimpleNamespace(
        reqs=requests,
        enable_overlap=overlap,
        device="cpu",
        maybe_evict_swa=lambda: None,
    )


def input_after(width: int, requests: int = 2) -> ours.DraftInput:
    some = torch.ones(requests, dtype=torch.int64)
    return ours.draft_input(some, some, width)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_step_writes_reserved_slots_only(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random widths; under overlap the host knows lengths one step later."""
    reservations, rng = Reservations(monkeypatch), np.random.default_rng(0)
    length = [20, 33]
    batch, step = running_batch(list(length), list(length), overlap), input_after(1)
    for _ in range(500):
        step.prepare_for_decode(batch)
        width = int(rng.choice([1, 1, 1, 4, BLOCK]))
        known = list(length)
        for i, request in enumerate(batch.reqs):
            assert length[i] + width <= request.kv.kv_allocated_len
            length[i] += int(rng.integers(1, width + 1))
            request.kv.kv_committed_len = known[i] if overlap else length[i]
        step = input_after(width)
    assert 50 < reservations.count < 400


def test_steps_without_drafts_reserve_once_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    reservations = Reservations(monkeypatch)
    batch = running_batch([20], [20])
    for _ in range(8 * BLOCK):
        input_after(1, 1).prepare_for_decode(batch)
        batch.reqs[0].kv.kv_committed_len += 1
    assert reservations.count == pytest.approx(8, abs=1.5)


def test_what_is_reserved_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that SGLang's method leaves behind, without reserving."""
    reservations, step = Reservations(monkeypatch), input_after(1)
    batch = running_batch([20, 30], [36, 46])
    step.prepare_for_decode(batch)
    assert reservations.count == 0
    assert batch.seq_lens_cpu.tolist() == [20, 30] and batch.seq_lens_cpu.dtype == torch.int64
    assert batch.seq_lens_sum == 50
    assert step.nxt_kv_lens_cpu is not None and step.nxt_kv_lens_cpu.tolist() == [36, 46]
    assert step.nxt_kv_lens_cpu.dtype == torch.int32 and step.nxt_kv_lens_sum == 82
    assert (step.max_top_k, step.uniform_top_k_value) == (7, None)
    assert [request.decode_batch_idx for request in batch.reqs] == [4, 4]


def test_a_merged_batch_expects_the_wider_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reservations, step = Reservations(monkeypatch), input_after(1, 1)
    step.merge_batch(input_after(BLOCK, 1))
    step.prepare_for_decode(running_batch([20, 30], [35, 45]))
    assert reservations.count == 1
