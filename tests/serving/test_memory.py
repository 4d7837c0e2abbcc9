"""SGLang's sizing of the target's pool as our hooks bend it: arithmetic on made-up sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.dflash_utils import scale_kv_cell_size_per_token_for_dflash

from sglang_dflash.serving.memory import DraftKVBudget

TARGET, DRAFT = 1000, 250


def sized(budget: DraftKVBudget, memory: int) -> Any:
    """As SGLang does: bytes per token first, then tokens."""

    def pool_config(_configurator: Any, budget_bytes: int) -> Any:
        cell = budget.cell_size(
            lambda **sizes: sum(sizes.values()),
            target_cell_size_per_token=TARGET,
            draft_cell_size_per_token=DRAFT,
        )
        return SimpleNamespace(max_total_num_tokens=budget_bytes // cell)

    return budget.pool_config(pool_config, SimpleNamespace(is_draft_worker=False), memory)


def test_a_bounded_cache_is_charged_once() -> None:
    budget = DraftKVBudget()
    assert sized(budget, 10_000_000).max_total_num_tokens == 8_000 and not budget.is_bounded
    budget.bounded_bytes = 500_000
    assert sized(budget, 10_000_000).max_total_num_tokens == 9_500 and budget.is_bounded
    assert budget.draft_cell_size(lambda _: DRAFT, None) == 0


@pytest.mark.parametrize("bound", [2_100_000, 20_000_000])
def test_a_bound_above_what_the_pool_could_hold_gives_way(bound: int) -> None:
    """Charged once it would leave the target fewer tokens than a draft slot for each of them does."""
    budget = DraftKVBudget()
    budget.bounded_bytes = bound
    assert sized(budget, 10_000_000).max_total_num_tokens == 8_000 and not budget.is_bounded
    assert budget.draft_cell_size(lambda _: DRAFT, None) == DRAFT


def test_once_allocated_the_draft_kv_is_not_charged_again() -> None:
    budget = DraftKVBudget()
    budget.bounded_bytes = 0
    assert sized(budget, 9_000_000).max_total_num_tokens == 9_000


def test_the_hooked_functions_have_the_arguments_that_the_hooks_take() -> None:
    assert scale_kv_cell_size_per_token_for_dflash(
        target_cell_size_per_token=TARGET,
        target_num_layers=4,
        draft_num_layers=1,
        draft_cell_size_per_token=DRAFT,
    ) == (TARGET + DRAFT)


def test_every_hook_found_its_target() -> None:
    """SGLang only logs a hook whose target has moved."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ours = {
        target
        for target, hooks in HookRegistry._hooks.items()
        if any("sglang_dflash" in hook.__module__ for _, hook, _ in hooks)
    }
    assert len(ours) > 8
    assert ours <= HookRegistry._patched
