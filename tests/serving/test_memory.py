"""SGLang's sizing of the target's pool with our memory plan: arithmetic on made-up sizes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.model_executor.pool_configurator import _dflash_draft_cell_size
from sglang.srt.speculative.dflash_utils import scale_kv_cell_size_per_token_for_dflash
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.sizes import DraftMemory
from sglang_dflash.serving.start import memory
from sglang_dflash.serving.start.memory import (
    MemoryPlan,
    hand_plan_to_sizing,
    is_bounded,
    plan_of,
    pool_config,
    table_headroom,
)

TARGET, DRAFT, MEMORY = 1000, 250, 10_000_000


def runner_with(plan: MemoryPlan | None, is_draft_worker: bool = False) -> Any:
    """A target runner whose configurator got SGLang's description of the draft, and our plan."""
    described = SpecAuxHiddenStateConfig(dflash_draft_num_layers=1, dflash_target_layer_ids=[1, 2])
    runner = SimpleNamespace(spec_aux_config=described)
    if plan is not None:
        hand_plan_to_sizing(runner, plan)
    runner.kv_cache_configurator = SimpleNamespace(
        is_draft_worker=is_draft_worker,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_aux_config=runner.spec_aux_config,
        dflash_draft_cell_size_per_token=DRAFT,
    )
    return runner


def sglang_sizing(configurator: Any, budget_bytes: int) -> Any:
    """As `MHAPoolConfigurator` does with the same two functions: bytes per token, then tokens."""
    layers, cell = configurator.spec_aux_config.dflash_draft_num_layers, TARGET
    if layers:
        cell = scale_kv_cell_size_per_token_for_dflash(
            target_cell_size_per_token=TARGET,
            target_num_layers=4,
            draft_num_layers=layers,
            draft_cell_size_per_token=_dflash_draft_cell_size(configurator) or None,
        )
    return SimpleNamespace(max_total_num_tokens=budget_bytes // cell)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import pool_configurator

    monkeypatch.setattr(pool_configurator, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))


def tokens(runner: Any, budget_bytes: int = MEMORY) -> int:
    sized = pool_config(sglang_sizing, runner.kv_cache_configurator, budget_bytes)
    return sized.max_total_num_tokens


def with_tags(count: int) -> int:
    """Of that many target tokens, those that fit beside the tags of a bounded cache for them."""
    return (TARGET * count - 4 * count) // TARGET


NEEDED = DraftMemory(logits=1_000_000)
# Plan -> target tokens, and whether the sizing took the bound. A bound that is charged once leaves
# more tokens, unless the pool holds fewer draft slots: then it gives way to one per token.
SIZED: list[tuple[MemoryPlan | None, int, bool]] = [
    (None, 8_000, False),
    (MemoryPlan(None, replay=True), 8_000, False),
    (MemoryPlan(500_000, replay=False), with_tags(9_500), True),
    (MemoryPlan(2_100_000, replay=False), 8_000, False),
    (MemoryPlan(20_000_000, replay=False), 8_000, False),
    (MemoryPlan(None, replay=False, needed=NEEDED), 7_200, False),
    (MemoryPlan(500_000, replay=False, needed=NEEDED), with_tags(8_500), True),
]


@pytest.mark.parametrize(("plan", "expected", "bounded"), SIZED)
def test_a_bound_leaves_the_target_more_tokens(
    plan: MemoryPlan | None, expected: int, bounded: bool
) -> None:
    runner = runner_with(plan)
    # Without the row, SGLang's sizing alone.
    assert sglang_sizing(runner.kv_cache_configurator, MEMORY).max_total_num_tokens == 8_000
    assert tokens(runner) == expected and is_bounded(runner) is bounded
    kept = runner.kv_cache_configurator
    assert kept.spec_aux_config.dflash_target_layer_ids == [1, 2]
    assert plan_of(kept) == (plan and replace(plan, bounded=bounded))
    if not bounded:
        # Until it is allocated, the draft is charged per token.
        assert sglang_sizing(kept, MEMORY).max_total_num_tokens == 8_000


@pytest.mark.parametrize("bound", [500_000, 20_000_000, None], ids=["ring", "direct", "no-window"])
def test_allocated_draft_kv_is_not_charged_again(bound: int | None) -> None:
    """The second sizing, after graphs were captured, finds less memory free by the draft K/V."""
    runner = runner_with(MemoryPlan(bounded_draft_kv_bytes=bound, replay=False))
    first = tokens(runner)
    decided = is_bounded(runner)
    assert tokens(runner, first * TARGET) == first and is_bounded(runner) is decided


def test_what_is_allocated_is_not_left_free_again() -> None:
    """After graphs were captured, only what eager steps will need is missing."""
    needed = DraftMemory(slot_tables=750_000, logits=150_000, activations=100_000)
    runner = runner_with(MemoryPlan(None, replay=False, needed=needed))
    assert tokens(runner) == 7_200
    assert tokens(runner, 7_200_000) == 6_950


@pytest.mark.parametrize("reserved", [MEMORY, MEMORY + 1])
def test_no_room_for_the_drafter_is_refused(reserved: int) -> None:
    runner = runner_with(MemoryPlan(None, replay=False, needed=DraftMemory(logits=reserved)))
    with pytest.raises(ConfigError) as refused:
        tokens(runner)
    assert refused.value.field == "--mem-fraction-static"


def test_a_draft_runner_has_no_plan() -> None:
    runner = runner_with(MemoryPlan(bounded_draft_kv_bytes=500_000, replay=False), True)
    assert tokens(runner) == 8_000


@pytest.mark.parametrize(("page", "columns"), [(1, 32), (64, 95)])
def test_a_table_row_holds_what_is_reserved(
    page: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reserves two blocks ahead of the committed tokens, up to a page boundary."""
    from sglang.srt.mem_cache import allocation_sizing as sizing

    spec = SimpleNamespace(
        speculative_algorithm="DFLASH", speculative_num_steps=1, speculative_eagle_topk=1
    )
    for module in (sizing, memory):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    monkeypatch.setattr(sizing, "get_schedule", lambda: SimpleNamespace(page_size=page))
    monkeypatch.setattr(sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    monkeypatch.setattr(sizing, "max_speculative_num_draft_tokens", lambda: 16)
    original = inspect.unwrap(sizing.get_req_to_token_extra_context_len)
    assert original() == (20 if page == 1 else 95)
    assert table_headroom(original) == columns
    # SGLang ends a request two tokens before the limit; its newest token has no KV yet.
    context = 1000
    request = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0, kv_committed_len=context - 4))
    _, (reserved,), _ = sizing.page_aligned_decode_alloc_lens([request], reserve=32, page_size=page)
    assert reserved <= context + columns
    assert (reserved > context + original()) is (page == 1)
    spec.speculative_algorithm = None
    assert table_headroom(original) == original() == 20
