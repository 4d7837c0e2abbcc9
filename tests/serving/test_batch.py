"""A verify forward's preparation leaves SGLang's batch as it was, even if it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.serving.step import batch as ours


def running_batch(on_host: bool = True) -> Any:
    return SimpleNamespace(
        seq_lens_cpu=torch.tensor([5, 9]) if on_host else None,
        seq_lens_sum=14 if on_host else None,
        out_cache_loc=None,
        spec_info=SimpleNamespace(nxt_kv_lens_cpu=torch.tensor([13, 17]), nxt_kv_lens_sum=30),
    )


def prepare(batch: Any, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> dict[str, Any]:
    """Run `verify_batch` with a verify input that notes what it finds."""
    found: dict[str, Any] = {}

    def prepare_for_verify(_self: Any, batch: Any, _worker: Any) -> tuple[str, None]:
        found.update(lengths=batch.seq_lens_cpu.tolist(), total=batch.seq_lens_sum)
        if fails:
            raise RuntimeError("no memory")
        return "forward", None

    monkeypatch.setattr(ours.DFlashVerifyInput, "prepare_for_verify", prepare_for_verify)
    block = torch.zeros(2, 4, dtype=torch.int64)
    found["forward"] = ours.verify_batch(batch, None, block, block, block)
    return found


def test_host_lengths_count_the_block_in_during_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = running_batch()
    found = prepare(batch, monkeypatch)
    assert found == {"lengths": [9, 13], "total": 22, "forward": "forward"}
    assert batch.seq_lens_cpu.tolist() == [5, 9] and batch.seq_lens_sum == 14


def test_device_only_lengths_use_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = running_batch(on_host=False)
    assert prepare(batch, monkeypatch)["lengths"] == [13, 17]
    assert batch.seq_lens_cpu is None and batch.seq_lens_sum is None


def test_a_failed_preparation_puts_the_lengths_back(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = running_batch()
    with pytest.raises(RuntimeError, match="no memory"):
        prepare(batch, monkeypatch, fails=True)
    assert batch.seq_lens_cpu.tolist() == [5, 9] and batch.seq_lens_sum == 14


def test_a_failed_recomputation_puts_the_prefill_back() -> None:
    request = SimpleNamespace(get_fill_ids=lambda: list(range(6)))
    batch: Any = SimpleNamespace(
        reqs=[request],
        input_ids=torch.tensor([4, 5]),
        out_cache_loc=torch.tensor([14, 15]),
        prefix_lens=[4],
        extend_lens=[2],
        extend_num_tokens=2,
        extend_logprob_start_lens=[2],
    )
    before = dict(vars(batch))
    with pytest.raises(RuntimeError), ours.recompute_cached_tail(batch, [3]):
        assert batch.prefix_lens == [1]
        raise RuntimeError
    assert vars(batch) == before
