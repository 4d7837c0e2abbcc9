"""Memory of the draft KV cache and of verification, in SGLang's sizing of the target's pools.

SGLang charges a draft slot per target token. A bounded draft KV cache is charged once, and each
target token at its own price. If that leaves the target fewer tokens, because the bound exceeds
what the pool can hold, SGLang's way stands.

The worker's `MemoryPlan` reaches the sizing in SGLang's own description of the draft
(`SpecAuxHiddenStateConfig`), which the target's runner passes to its `KVCacheConfigurator`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.runtime_context import get_spec

from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.start.refusal import ends_the_server


@dataclass(frozen=True)
class MemoryPlan:
    """What our worker needs beside the target's pools.

    Attributes:
        bounded_draft_kv_bytes: bytes of a bounded draft KV cache; None if none was asked for.
        replay: whether recurrent layers roll back by replay, so that no snapshots are kept.
        bounded: whether the sizing took the bound; None before the sizing.
        reserved_bytes: what the drafter needs beside weights and K/V (`draft_memory`).
        later_bytes: what of it is not allocated yet when SGLang sizes its pools again, after graphs
            were captured.
        target_slot_bytes: of a bounded draft KV cache's tags, per target token.
    """

    bounded_draft_kv_bytes: int | None
    replay: bool
    bounded: bool | None = None
    reserved_bytes: int = 0
    later_bytes: int = 0
    target_slot_bytes: int = 0


class PlannedDraft(SpecAuxHiddenStateConfig):
    """SGLang's description of the draft, with our plan."""

    plan: MemoryPlan | None = None


def hand_plan_to_sizing(model_runner: Any, plan: MemoryPlan) -> None:
    """Attach the plan to the target's runner. To be called before SGLang sizes its pools."""
    described = msgspec.structs.asdict(model_runner.spec_aux_config)
    model_runner.spec_aux_config = PlannedDraft(**described, plan=plan)


def plan_of(configurator: Any) -> MemoryPlan | None:
    """The plan for a `KVCacheConfigurator`; None if our worker does not serve its runner."""
    if configurator.is_draft_worker:
        return None
    return getattr(configurator.spec_aux_config, "plan", None)


def is_bounded(model_runner: Any) -> bool:
    """Whether the target's pool was sized for a bounded draft KV cache."""
    plan = plan_of(model_runner.kv_cache_configurator)
    return plan is not None and bool(plan.bounded)


def pool_config(original: Any, configurator: Any, budget_bytes: int, **others: Any) -> Any:
    """Around `KVCacheConfigurator.config_from_budget`: leave what the drafter needs beside its K/V,
    take the way that gives the target more tokens, and note in the configurator's plan which one
    that is. Raises ConfigError: nothing would be left."""
    plan = plan_of(configurator)
    if plan is None:
        return original(configurator, budget_bytes, **others)
    if plan.bounded is not None:
        # Sized again, after graphs were captured: the draft K/V is allocated and not in the budget.
        _charge_draft(configurator, plan, layers=0, cell=None)
        return original(configurator, budget_bytes - plan.later_bytes, **others)
    budget_bytes = _without_reserve(plan, budget_bytes)
    per_token = original(configurator, budget_bytes, **others)
    bound = plan.bounded_draft_kv_bytes
    if bound is not None and budget_bytes > bound:
        charged = _draft_charge(configurator)
        _charge_draft(configurator, replace(plan, bounded=True), layers=0, cell=None)
        bounded = original(configurator, budget_bytes - bound, **others)
        if plan.target_slot_bytes:
            tags = plan.target_slot_bytes * bounded.max_total_num_tokens
            bounded = original(configurator, budget_bytes - bound - tags, **others)
        if bounded.max_total_num_tokens >= per_token.max_total_num_tokens:
            return bounded
        _charge_draft(configurator, replace(plan, bounded=False), *charged)
        return per_token
    _charge_draft(configurator, replace(plan, bounded=False), *_draft_charge(configurator))
    return per_token


def _without_reserve(plan: MemoryPlan, budget_bytes: int) -> int:
    left = budget_bytes - plan.reserved_bytes
    if left > 0:
        return left
    with ends_the_server({}):
        raise ConfigError(
            f"the drafter needs {plan.reserved_bytes / 2**20:.0f} MiB beside weights and K/V, and "
            f"{budget_bytes / 2**20:.0f} MiB are left for all pools; raise --mem-fraction-static, "
            "or lower --max-running-requests, --context-length or --speculative-num-draft-tokens"
        )


def table_positions(context_len: int) -> int:
    """Columns of SGLang's request-to-token table, for that --context-length."""
    return context_len + table_headroom(allocation_sizing.get_req_to_token_extra_context_len)


def table_headroom(original: Any) -> int:
    """Around `get_req_to_token_extra_context_len`: columns of the request-to-token table beyond the
    context length, enough for the two blocks that SGLang reserves ahead of the committed tokens."""
    if get_spec().speculative_algorithm is None:
        return original()
    return max(original(), get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def _draft_charge(configurator: Any) -> tuple[int | None, int | None]:
    """What SGLang charges the draft's KV by, per target token: layers, and bytes if known."""
    layers = configurator.spec_aux_config.dflash_draft_num_layers
    return layers, configurator.dflash_draft_cell_size_per_token


def _charge_draft(
    configurator: Any, plan: MemoryPlan, layers: int | None, cell: int | None
) -> None:
    described = msgspec.structs.asdict(configurator.spec_aux_config)
    described.update(dflash_draft_num_layers=layers, plan=plan)
    configurator.spec_aux_config = PlannedDraft(**described)
    configurator.dflash_draft_cell_size_per_token = cell
