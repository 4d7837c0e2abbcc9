"""Memory of the drafter and of verification, in SGLang's sizing of the target's pools.

SGLang charges draft K/V of all layers for each target token. We let it charge only the layers that
have an entry per slot, and subtract rings from its budget.

The worker's `DraftReservation` reaches the sizing in SGLang's own description of the draft
(`SpecAuxHiddenStateConfig`), which the target's runner passes to its `KVCacheConfigurator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
)
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import (
    attention_backends,
    get_context,
    get_memory,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.checkpoint.target_config import RecurrentShape
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.log import Log
from sglang_dflash.memory import sizes
from sglang_dflash.memory.draft_memory import DraftMemory, NarrowForwards, draft_memory
from sglang_dflash.memory.pools import (
    STATE_RATIO,
    Capacity,
    StateDemand,
    carried_requests,
    default_states,
    sglang_states,
)
from sglang_dflash.memory.sizes import Charge, GroupKVSize, draft_kv_charge
from sglang_dflash.patches.restored import restored
from sglang_dflash.serving.gpu.graphs import captured_sizes, target_has_graphs
from sglang_dflash.serving.hybrid.replay_pool import ReplayPool
from sglang_dflash.serving.start.one_line_errors import ends_the_server
from sglang_dflash.serving.start.plan import Plan

logger = Log(__name__)


@dataclass(frozen=True)
class DraftReservation:
    """Memory that SGLang's sizing leaves for our worker, beside the target's pools.

    Attributes:
        draft_kv: requests with rings -> the K/V sizes of each group of draft layers.
        carried: requests that recurrent states let run, which have rings; --max-running-requests
            before the sizing.
        needed: the drafter's memory beside weights and K/V.
        recorded: whether the drafter's steps are recorded as CUDA graphs.
        charge: memory that draft K/V takes beside the pool; None before the sizing.
    """

    draft_kv: Callable[[int], tuple[GroupKVSize, ...]]
    carried: int
    needed: DraftMemory = field(default_factory=DraftMemory)
    recorded: bool = False
    charge: Charge | None = None


class ReservedDraft(SpecAuxHiddenStateConfig):
    """SGLang's description of the draft, with what to reserve for it."""

    reservation: DraftReservation | None = None


# -- the reservation, before SGLang sizes its pools ------------------------------------------------


def draft_reservation(plan: Plan, model_config: Any) -> DraftReservation:
    """Compute the memory that a server's sizing is to leave free. Logs one line.

    Args:
        model_config: SGLang's, of the target.
    """
    recorded = plan.recorder is not None
    largest = captured_sizes(plan.max_running)[-1] if recorded else 0
    positions = table_positions(model_config.context_len)
    steps = plan.step_sizes(positions, largest, _narrow_forwards(plan, model_config))
    needed = draft_memory(plan.model.config, steps)
    logger.info("reserved beside draft K/V, before the KV pools are sized: %s", needed)
    return DraftReservation(
        draft_kv=plan.draft_kv,
        carried=plan.max_running,
        needed=needed,
        recorded=recorded,
    )


def _narrow_forwards(plan: Plan, model_config: Any) -> NarrowForwards:
    """The narrow forwards that `TargetForwardByWidth` will make. SGLang sizes its KV pools before,
    and knows only the block's width."""
    widths = plan.policy.widths[:-1]
    if not widths or plan.device.type == "cpu":
        return NarrowForwards(widths)
    heads = model_config.get_num_attention_heads(get_parallel().attn_tp_size)
    return NarrowForwards(
        widths,
        attention=attention_backends(),
        query_width=heads * model_config.head_dim,
        captured=captured_sizes(plan.max_running) if target_has_graphs(plan.device) else (),
    )


def note_reservation(owner: Any, reservation: DraftReservation, **changed: Any) -> None:
    """Attach the reservation, and other changes, to SGLang's description of the draft.

    Args:
        owner: the target's runner, before SGLang sizes its pools; then its `KVCacheConfigurator`.
    """
    described = {**msgspec.structs.asdict(owner.spec_aux_config), **changed}
    owner.spec_aux_config = ReservedDraft(**{**described, "reservation": reservation})


# -- SGLang's sizing -------------------------------------------------------------------------------


def reservation_of(configurator: Any) -> DraftReservation | None:
    """The reservation for a `KVCacheConfigurator`; None if our worker does not serve its runner."""
    if configurator.is_draft_worker:
        return None
    return getattr(configurator.spec_aux_config, "reservation", None)


def pool_config(original: Any, configurator: Any, budget_bytes: int, **others: Any) -> Any:
    """Around `KVCacheConfigurator.config_from_budget`: leave what the drafter needs, rings
    included, and note it in the configurator. Raises ConfigError: nothing would be left."""
    reservation = reservation_of(configurator)
    if reservation is None:
        return original(configurator, budget_bytes, **others)
    if reservation.charge is not None:
        # Sized again, after graphs were captured: the draft K/V is allocated and not in the budget.
        _charge_draft(configurator, reservation, per_token=0)
        later = reservation.needed.after_graphs(reservation.recorded)
        return _told(configurator, original(configurator, budget_bytes - later, **others))
    budget_bytes = _without_reserve(reservation, budget_bytes)
    reservation = replace(reservation, carried=_carried(configurator, reservation.carried))

    def note_and_size(charge: Charge) -> Any:
        _charge_draft(configurator, replace(reservation, charge=charge), charge.per_token)
        return original(configurator, budget_bytes - charge.once, **others)

    groups = reservation.draft_kv(reservation.carried)
    charge = draft_kv_charge(groups, lambda tried: note_and_size(tried).max_total_num_tokens)
    config = note_and_size(charge)
    return config if configurator.post_capture_kv_active else _told(configurator, config)


def _carried(configurator: Any, max_running: int) -> int:
    """Return how many of so many requests the recurrent states let run."""
    if configurator.mambaish_config is None:
        return max_running
    each = configurator._calculate_mamba_ratio()
    return carried_requests(max_running, get_schedule().max_mamba_cache_size, each)


def _told(configurator: Any, config: Any) -> Any:
    """Log what runs at a time, and what keeps it below --max-running-requests."""
    schedule, is_recurrent = get_schedule(), configurator.mambaish_config is not None
    capacity = Capacity(
        tokens=config.max_total_num_tokens,
        tokens_given=schedule.max_total_tokens is not None,
        max_running=max(1, schedule.max_running_requests // configurator.attn_dp_size),
        context=configurator.model_config.context_len,
        reserved=get_alloc_reserve_per_decode(),
        states=schedule.max_mamba_cache_size if is_recurrent else None,
        states_per_request=configurator._calculate_mamba_ratio() if is_recurrent else 1,
        state_bytes=_state_bytes(configurator) if is_recurrent else 0,
    )
    logger.info("%s", capacity)
    short = capacity.shortfall()
    if short is not None:
        logger.warning("%s", short)
    return config


def _without_reserve(reservation: DraftReservation, budget_bytes: int) -> int:
    needed = reservation.needed.total
    if budget_bytes > needed:
        return budget_bytes - needed
    with ends_the_server({}):
        raise ConfigError(
            "--mem-fraction-static",
            required=f"the drafter needs {needed / 2**20:.0f} MiB beside weights and "
            f"K/V, and {budget_bytes / 2**20:.0f} MiB are left for all pools; raise it, or lower "
            "--max-running-requests, --context-length or --speculative-num-draft-tokens",
        )


def _charge_draft(configurator: Any, reservation: DraftReservation, per_token: int) -> None:
    """Note the reservation, and charge so many bytes of draft K/V per target token."""
    # SGLang charges the bytes if there is a layer.
    note_reservation(configurator, reservation, dflash_draft_num_layers=int(per_token > 0))
    configurator.dflash_draft_cell_size_per_token = per_token or None


def carried_by(runner: Any) -> int:
    """Requests that the sized recurrent states of the target's runner let run, of a server of our
    worker. Raises RuntimeError: the pools were sized without the reservation."""
    return _charged(runner.kv_cache_configurator).carried


def note_eager_steps(configurator: Any) -> None:
    """Note that draft steps run eagerly after all: SGLang's sizing after the captures then leaves
    memory for them."""
    note_reservation(configurator, replace(_charged(configurator), recorded=False))


def _charged(configurator: Any) -> DraftReservation:
    """Return the reservation that the pools were sized with. Raises RuntimeError without one: what
    the drafter allocates would be missing later."""
    reservation = reservation_of(configurator)
    if reservation is None or reservation.charge is None:
        raise RuntimeError(
            "SGLang sized its KV pools without the drafter's memory: the reservation in "
            "`spec_aux_config` did not reach `KVCacheConfigurator.config_from_budget`. Another "
            "plugin, or another version of SGLang, may build it anew; with "
            "--speculative-dflash-worker builtin, nothing is reserved"
        )
    return reservation


def table_positions(context_len: int) -> int:
    """Columns of SGLang's request-to-token table, for that --context-length."""
    return context_len + table_headroom(allocation_sizing.get_req_to_token_extra_context_len)


def table_headroom(original: Any) -> int:
    """Around `get_req_to_token_extra_context_len`: columns of the request-to-token table beyond the
    context length: SGLang reserves two blocks ahead of the committed tokens, and our worker the
    bonus token after them."""
    if get_spec().speculative_algorithm is None:
        return original()
    return max(original(), get_alloc_reserve_per_decode() + get_alloc_page_size())


# -- the pool of recurrent states, if replay serves ------------------------------------------------


def build_state_pool(original: Any, configurator: Any, **kwargs: Any) -> Any:
    """Around `KVCacheConfigurator._build_hybrid_req_pool`, and that of a decode server: with
    `ReplayPool`."""
    with restored(HybridReqToTokenPool, "mamba_pool_cls"):
        HybridReqToTokenPool.mamba_pool_cls = ReplayPool
        return original(configurator, **kwargs)


def size_state_pool(original: Any, configurator: Any, total_rest_gb: float) -> float:
    """Around `KVCacheConfigurator._handle_max_mamba_cache`: reserve what replay keeps of a verify
    forward, and no snapshots; choose the number of states where no flag does. Without a speculative
    algorithm SGLang reserves no snapshots."""
    total_rest_gb -= _replay_bytes(configurator) / 2**30
    if _splits_by_default(configurator):
        _choose_states(configurator, int(total_rest_gb * 2**30))
    with restored(configurator, "spec_algorithm"):
        configurator.spec_algorithm = SpeculativeAlgorithm.NONE
        return original(configurator, total_rest_gb)


def _splits_by_default(configurator: Any) -> bool:
    """Return whether SGLang would split the memory by a ratio that neither a flag nor the model
    gives."""
    raw_input = getattr(configurator.server_args, "_raw_input", None) or {}
    schedule = get_schedule()
    return (
        all(
            raw_input.get(name) is None
            for name in ("max_mamba_cache_size", "mamba_full_memory_ratio")
        )
        and schedule.mamba_full_memory_ratio == STATE_RATIO
        and not get_memory().disable_radix_cache
    )


def _choose_states(configurator: Any, pool_bytes: int) -> None:
    """Set --max-mamba-cache-size to the default with replay. One log line.

    Args:
        pool_bytes: for states, the K/V of target and draft, and draft steps.
    """
    schedule = get_schedule()
    reservation: DraftReservation = configurator.spec_aux_config.reservation
    _charge_draft(configurator, reservation, per_token=0)
    demand = StateDemand.of(
        reservation.draft_kv(reservation.carried),
        max_running=max(1, schedule.max_running_requests // configurator.attn_dp_size),
        states_per_request=configurator._calculate_mamba_ratio(),
        state_bytes=_state_bytes(configurator),
        target_token_bytes=create_memory_pool_configurator(configurator)._cell_size,
        context=configurator.model_config.context_len,
        most_tokens=schedule.max_total_tokens,
    )
    chosen = default_states(pool_bytes, reservation.needed.total, demand)
    by_ratio = sglang_states(
        pool_bytes, demand.state_bytes, states_per_request=demand.states_per_request
    )
    if chosen == by_ratio:
        return
    logger.info(
        "%d recurrent states, in place of the %d of SGLang's split, leave K/V %.2f GiB more; "
        "--mamba-full-memory-ratio %s gives that split",
        chosen, by_ratio, (by_ratio - chosen) * demand.state_bytes / 2**30, STATE_RATIO,
    )  # fmt: skip
    # SGLang divides a number that is given.
    total_states = chosen * configurator.attn_dp_size
    get_context().override("sglang_dflash.recurrent_states", max_mamba_cache_size=total_states)


def _state_bytes(configurator: Any) -> int:
    """Return the bytes of a recurrent state, as SGLang charges it."""
    params = configurator.mambaish_config.mamba2_cache_params
    return int(params.mamba_cache_per_req) + int(configurator.extra_mamba_cache_bytes_per_req)


def _replay_bytes(configurator: Any) -> int:
    """Return the replay bytes of all running requests and of SGLang's row for padding."""
    params = configurator.mambaish_config.mamba2_cache_params
    rows = get_schedule().max_running_requests // configurator.attn_dp_size + 1
    shape = RecurrentShape(len(params.layers), *params.shape.conv[0], *params.shape.temporal)
    return rows * sizes.replay_bytes(
        shape,
        get_spec().speculative_num_draft_tokens,
        itemsize=params.dtype.conv.itemsize,
        gate_itemsize=configurator.model_config.dtype.itemsize,
    )
