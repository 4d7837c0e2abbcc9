"""Checkpoints of recurrent states that the prefix cache keeps while requests decode."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor as Processor,
)

from sglang_dflash.serving.hybrid import rollback
from sglang_dflash.serving.hybrid.rollback import check_checkpoints, make_rollback
from sglang_dflash.serving.step.scheduler import count_mixed_token
from tests.errors import refused
from tests.patches.originals import original
from tests.serving.batches import batch_of, request_of

GRID = 64


def context(**mamba: Any) -> Any:
    """Settings as SGLang resolves them: two slots per request, which take turns."""
    fields = {"enable_mamba_extra_buffer": True, "enable_mamba_extra_buffer_lazy": False}
    return lambda: SimpleNamespace(
        mamba=SimpleNamespace(**{**fields, "mamba_track_interval": GRID, **mamba})
    )


def mistaken(monkeypatch: pytest.MonkeyPatch, block: int, overlaps: bool) -> int:
    """Decode with SGLang's bookkeeping, and count the steps after which a slot holds another state
    than the one that SGLang would hand to the prefix cache if the request ended there."""
    monkeypatch.setattr(batch_result_processor, "get_exec", context())
    monkeypatch.setattr(batch_result_processor, "mamba_track_grid", lambda _page: GRID)
    processor: Any = SimpleNamespace(tree_cache=SimpleNamespace(page_size=1))
    processor._mamba_check_track_boundary = partial(
        Processor._mamba_check_track_boundary, processor
    )
    kv = SimpleNamespace(
        mamba_ping_pong_track_buffer=[0, 1], mamba_next_track_idx=0, mamba_last_track_idx=None,
        mamba_last_track_seqlen=None, mamba_prev_track_seqlen=None,
    )  # fmt: skip
    # SGLang counts the bonus token, too.
    request: Any = SimpleNamespace(kv=kv, seqlen=21)
    batch: Any = SimpleNamespace(
        mamba_track_buffer_indices=None,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        req_to_token_pool=SimpleNamespace(get_mamba_ping_pong_other_idx=lambda index: 1 - index),
    )
    rng, length, states, unknown, count = random.Random(0), 20, dict[int, int](), list[int](), 0
    for _ in range(400):
        accepted = rng.choice((block, rng.randint(1, block)))
        before, length = length, length + accepted
        if before // GRID != length // GRID:
            states[kv.mamba_next_track_idx] = length // GRID * GRID
        unknown.append(accepted)
        while len(unknown) > overlaps:
            tokens = unknown.pop(0)
            request.seqlen += tokens
            result: Any = SimpleNamespace(
                num_correct_drafts_per_req_cpu=[tokens - 1],
                num_non_draft_tokens_per_req=1,
                grammar_retained_tokens=None,
            )
            Processor._mamba_prefix_cache_update(processor, request, batch, result, 0)
            last = kv.mamba_last_track_idx
            count += last is not None and states[last] != kv.mamba_last_track_seqlen
    return count


@pytest.mark.parametrize("block", [8, GRID // 2, GRID // 2 + 1, GRID])
def test_sglang_mistakes_a_checkpoint_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Just where we refuse blocks."""
    assert mistaken(monkeypatch, block, overlaps=False) == 0
    assert (mistaken(monkeypatch, block, overlaps=True) > 0) == (2 * block > GRID)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A server's settings, to be changed; its recurrent layers have chunks of 64 tokens."""
    settings: dict[str, Any] = {"disable_overlap_schedule": False}
    mamba: dict[str, Any] = {}
    monkeypatch.setattr(rollback, "get_exec", lambda: context(**mamba)())
    monkeypatch.setattr(rollback, "get_schedule", lambda: SimpleNamespace(**settings))
    monkeypatch.setattr(rollback, "get_alloc_page_size", lambda: 16)
    monkeypatch.setattr(rollback, "mamba_checkpoint_grid", lambda _page: 64)
    monkeypatch.setattr(
        rollback, "mamba_track_grid", lambda _page: mamba.get("mamba_track_interval", GRID)
    )
    return {"schedule": settings, "mamba": mamba}


def test_blocks_that_reach_over_two_checkpoints_are_refused(resolved: dict[str, Any]) -> None:
    check_checkpoints(GRID // 2)
    with refused("--mamba-track-interval", 64, "128 or more"):
        check_checkpoints(GRID // 2 + 1)
    resolved["mamba"]["mamba_track_interval"] = 128
    check_checkpoints(GRID)
    with refused("--mamba-track-interval", 128, "192 or more"):
        check_checkpoints(GRID + 1)


@pytest.mark.usefixtures("resolved")
def test_a_target_without_recurrent_layers_has_no_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = SimpleNamespace(model_config=None)
    monkeypatch.setattr(rollback, "mambaish_config", lambda _: None)
    assert make_rollback("auto", runner, GRID) is None
    monkeypatch.setattr(rollback, "mambaish_config", lambda _: object())
    with refused("--mamba-track-interval"):
        make_rollback("auto", runner, GRID)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("schedule", "disable_overlap_schedule", True),
        ("mamba", "enable_mamba_extra_buffer", False),
        ("mamba", "enable_mamba_extra_buffer_lazy", True),
    ],
)
def test_other_ways_of_keeping_states_take_any_block(
    resolved: dict[str, Any], part: str, name: str, value: bool
) -> None:
    resolved[part][name] = value
    check_checkpoints(4 * GRID)


PREFILL = original(f"{Processor.__module__}.{Processor.__name__}.process_batch_result_prefill")


def cached_tokens(monkeypatch: pytest.MonkeyPatch, process: Any, left: int) -> list[int]:
    """Run a mixed step that decodes one token, of which the answer may have that many. Returns how
    many tokens the prefix cache takes its state for, one per state, and what is committed then."""
    kept = list[int]()

    def release(request: Any, _cache: Any, *, checkpoint: bool) -> None:
        assert checkpoint
        kept.append(request.owned_kv_len())

    monkeypatch.setattr(batch_result_processor, "release_kv_cache", release)
    serving = SimpleNamespace(strip_thinking_cache=False)
    monkeypatch.setattr(schedule_batch, "get_serving", lambda: serving)
    memory = SimpleNamespace(enable_hisparse=False)
    monkeypatch.setattr(batch_result_processor, "get_memory", lambda: memory)
    monkeypatch.setattr(batch_result_processor, "checkpoint_kv_cache", lambda *_: None)
    prompt = request_of("prompt", prompt=30, max_new_tokens=8)
    # The newest token has no K/V yet.
    decoding = request_of("decoding", prompt=20, output=5, max_new_tokens=5 + left)
    decoding.kv.kv_committed_len = 24
    for request in (prompt, decoding):
        request.sampling_params.normalize(None)
    batch = batch_of(prompt, decoding, decoding_reqs=[decoding])
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    result = MagicMock(
        copy_done=None, auxiliary_host_output=None, routed_experts_output=None,
        indexer_topk_output=None, next_token_ids=torch.tensor([7, 8]),
    )  # fmt: skip
    processor = MagicMock(is_generation=True)
    processor._maybe_update_reasoning_tokens = lambda *_: None
    processor.snapshot_auxiliary_output_starts = lambda *_: None
    process(processor, batch, result)
    assert list(decoding.output_ids) == [1] * 5 + [8]
    return [*kept, decoding.kv.kv_committed_len]


def test_a_mixed_step_ends_a_token_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the request that decodes has read 25 tokens, and so has its K/V."""
    run = partial(cached_tokens, monkeypatch)
    ours = partial(count_mixed_token, PREFILL)
    assert run(PREFILL, left=2) == run(ours, left=2) == [25]
    assert run(PREFILL, left=1) == [24, 24]
    assert run(ours, left=1) == [25, 25]
