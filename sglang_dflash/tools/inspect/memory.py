"""The memory of a GPU that serves a pair, by what takes it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.checkpoint.precision import quantization_section
from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.capabilities import CAPABILITIES, choose_attention
from sglang_dflash.drafting.options import MOST_WAITING_STEPS, ResolvedOptions
from sglang_dflash.memory import sizes
from sglang_dflash.memory.draft_memory import (
    DraftMemory,
    NarrowForwards,
    StepSizes,
    default_captures,
    draft_memory,
    headroom,
)
from sglang_dflash.memory.pools import (
    StateDemand,
    StatePool,
    at_a_time,
    default_states,
    sglang_states,
    state_pool,
)
from sglang_dflash.memory.sizes import KV_DTYPES, GroupKVSize
from sglang_dflash.serving.metrics.server_info import OURS
from sglang_dflash.tools.inspect.kv import GIB, draft_groups, split_kv
from sglang_dflash.tools.inspect.pair import ServingDecision
from sglang_dflash.tools.inspect.serving import Serving

# Multiprocessors of an H100; SGLang's head dim of a target with latent attention.
_PROCESSORS, _LATENT_HEAD_DIM = 132, 256


def memory_of(
    target: ModelFacts,
    draft: ModelFacts,
    decision: ServingDecision,
    options: ResolvedOptions,
    serving: Serving,
) -> dict[str, Any]:
    """Return the division of one GPU's memory, by name. Raises ConfigError."""
    requests, ranks, config = serving.max_running_requests, serving.tp_size, decision.config
    part = decision.geometry.of_rank(ranks)
    target_kv = sizes.target_kv_bytes(part, KV_DTYPES[serving.kv_dtype or "bfloat16"])
    groups = draft_groups(draft, decision, options, serving, requests)
    of_groups = [kv for _, kv in groups]
    recurrent = _recurrent(part, decision.worker, options.verify_block)
    needed = _draft_memory(decision, part, options, serving, of_groups)
    steps = 0 if needed is None else needed.total
    of_target, of_draft = (
        None if size is None else -(-size // ranks)
        for size in (_target_weights(target, decision.geometry, serving), draft.weight_bytes)
    )
    if config is not None:
        of_draft = sizes.draft_weight_bytes(config.of_rank(ranks))
    memory = _kv_memory(serving, of_target, of_draft, steps)
    alone = _kv_memory(serving, of_target, 0, 0)
    pool, plain = _pools(serving, memory, steps, alone, recurrent, of_groups, target_kv, options)
    if pool is not None and plain is not None:
        memory, alone = memory - pool.total_bytes, alone - plain.total_bytes
        # A ring serves the requests that the states let run.
        groups = draft_groups(draft, decision, options, serving, pool.carried)
    facts = {
        "target_kv_bytes_per_token": target_kv,
        "draft_kv_bytes_per_token": sum(kv.token_bytes for kv in of_groups),
        "kv_memory_bytes": memory,
        "target_weight_bytes": of_target,
        "draft_weight_bytes": of_draft,
        "draft_step_bytes": needed and steps,
        "draft_memory_bytes": needed and needed.as_report(),
        **recurrent,
        "recurrent_slots": pool and pool.slots,
        "running_requests": pool.carried if pool else requests,
        "running_requests_without_draft": plain.carried if plain else requests,
        **split_kv(memory, target_kv, groups),
        "target_tokens_without_draft": alone // target_kv,
    }
    for suffix, states in {"": pool, "_without_draft": plain}.items():
        reserved = 1 if suffix else 2 * options.verify_block
        carried, tokens = states.carried if states else requests, facts[f"target_tokens{suffix}"]
        facts[f"requests_at_context{suffix}"] = serving.context and at_a_time(
            tokens, carried, serving.context, reserved
        )
    return {**facts, "memory_bytes": _divided(facts, pool, serving)}


def _pools(
    serving: Serving,
    memory: int,
    steps: int,
    alone: int,
    recurrent: Mapping[str, Any],
    groups: Sequence[GroupKVSize],
    target_kv: int,
    options: ResolvedOptions,
) -> tuple[StatePool | None, StatePool | None]:
    """Return the pools of recurrent states, as served and without a draft; None without such
    layers.

    Args:
        memory: bytes for the pool of states and both KV pools.
        steps: bytes of draft steps, which a server takes from K/V only.
        alone: `memory` without a draft.
        groups: of draft layers, with rings for all requests.
        target_kv: bytes of a token.

    Raises:
        ConfigError: the pool does not hold the states of one request.
    """
    requests, max_slots = serving.max_running_requests, serving.max_mamba_cache_size
    state, replay = (recurrent[f"recurrent_{each}_bytes"] for each in ("state", "replay"))
    if not state or serving.kv_memory_gib is not None:
        return None, None
    if recurrent["recurrent_rollback"] == "replay":
        demand = StateDemand.of(
            groups,
            max_running=requests,
            state_bytes=state,
            target_token_bytes=target_kv,
            context=options.context,
        )
        slots = max_slots or default_states(memory + steps - (requests + 1) * replay, steps, demand)
        pool = state_pool(slots, requests, state, replay, 0)
    else:
        # SGLang's sizing leaves room for a state per position, more than its snapshots take.
        snapshot = options.verify_block * state
        slots = max_slots or sglang_states(memory + steps, state, snapshot)
        pool = state_pool(slots, requests, state, 0, snapshot)
    if not pool.carried:
        raise ConfigError(
            "memory_gib",
            serving.memory_gib,
            f"{memory / GIB:.2f} GiB beside weights and draft steps hold the recurrent states "
            f"of no request; give more, or fewer requests ({{max_running_requests}})",
        )
    plain = max_slots or sglang_states(alone, state)
    return pool, state_pool(plain, requests, state, 0, 0)


def _divided(
    facts: Mapping[str, Any], states: StatePool | None, serving: Serving
) -> dict[str, int] | None:
    """A GPU's memory by what takes it: the parts sum to the whole. None if only that of the KV
    pools is known."""
    if serving.kv_memory_gib is not None:
        return None
    parts = {
        "target weights": facts["target_weight_bytes"],
        "draft weights": facts["draft_weight_bytes"],
        "draft steps": facts["draft_step_bytes"] or 0,
        "recurrent states": states.state_bytes if states else 0,
        "recurrent rollback": states.scratch_bytes if states else 0,
        "target KV": facts["target_tokens"] * facts["target_kv_bytes_per_token"],
        "draft KV": facts["draft_kv_bytes"],
    }
    return {**parts, "left to SGLang": int(serving.memory_gib * GIB) - sum(parts.values())}


def _target_weights(target: ModelFacts, geometry: TargetGeometry, serving: Serving) -> int | None:
    """Bytes of the target's weights; None if that is not known.

    Raises:
        ConfigError: they are to be quantized, and are already, in another way.
    """
    stored = quantization_section(target.config).get("quant_method")
    if target.weight_bytes is None or serving.quantization in (None, stored):
        return target.weight_bytes
    if is_quantized(target):
        required = f"the weights of {target.name} are quantized already; leave it out"
        raise ConfigError("quantization", serving.quantization, required)
    # SGLang leaves the embeddings and the lm_head as they are.
    embedding = sizes.embedding_bytes(geometry, tied=bool(target.config.get("tie_word_embeddings")))
    return embedding + (target.weight_bytes - embedding) // 2


def is_quantized(target: ModelFacts) -> bool:
    """Return whether the target's config.json tells of quantized weights."""
    return bool(quantization_section(target.config))


def _kv_memory(serving: Serving, target: int | None, draft: int | None, steps: int) -> int:
    """Bytes for both KV pools and recurrent states: what weights and draft steps leave."""
    if serving.kv_memory_gib is not None:
        return int(serving.kv_memory_gib * GIB)
    if target is None or draft is None:
        unknown = "target" if target is None else "draft"
        raise ConfigError(
            "kv_memory_gib",
            required=f"required, because the size of the {unknown}'s weights is not known: a "
            "folder tells it by its weights or by model.safetensors.index.json",
        )
    weights = target + draft
    usable = int(serving.memory_gib * serving.mem_fraction * GIB)
    left = usable - weights - steps
    if left <= 0:
        ranks = serving.tp_size
        while weights * serving.tp_size >= usable * ranks:
            ranks *= 2
        advice = "give more, or fewer requests ({max_running_requests})"
        if ranks > serving.tp_size:
            advice = f"the weights alone do not fit: give {{tp_size}} {ranks}, or more memory"
        raise ConfigError(
            "memory_gib",
            serving.memory_gib,
            f"with {{mem_fraction}} {serving.mem_fraction:g}, {weights / GIB:.2f} GiB of weights "
            f"and {steps / GIB:.2f} GiB of draft steps leave nothing for KV; {advice}",
        )
    return left


def _draft_memory(
    decision: ServingDecision,
    part: TargetGeometry,
    options: ResolvedOptions,
    serving: Serving,
    kv: Sequence[GroupKVSize],
) -> DraftMemory | None:
    """The memory that our worker reserves for draft steps; None if another worker serves.

    Args:
        part: a rank's of the target.
        kv: a rank's draft K/V.

    Raises:
        ConfigError: the draft attention backend cannot serve the draft.
    """
    config, requests = decision.config, serving.max_running_requests
    if decision.worker != OURS or config is None:
        return None
    attention = choose_attention(serving.attention, config, "cuda", serving.dtype_of_draft_kv)
    # MLA's queries, as SGLang counts them.
    head_dim = part.head_dim if part.latent is None else _LATENT_HEAD_DIM
    narrow = NarrowForwards(
        options.adaptive_widths()[:-1] if serving.width == "adaptive" else (),
        attention=(serving.target_attention,),
        query_width=part.num_attention_heads * head_dim,
        captured=default_captures(requests),
    )
    steps = StepSizes(
        options=options,
        max_running=requests,
        rows=requests + 1,
        positions=(options.context or 0) + headroom(options.verify_block),
        ranks=serving.tp_size,
        itemsize=KV_DTYPES["bfloat16"],
        kv=kv,
        tagged=False,
        attention=CAPABILITIES[attention],
        processors=_PROCESSORS,
        recorded=requests if CAPABILITIES[attention].capturable else 0,
        most_waiting_steps=MOST_WAITING_STEPS if narrow.widths else 0,
        narrow=narrow,
    )
    return draft_memory(config, steps)


def _recurrent(geometry: TargetGeometry, worker: str, verify_block: int) -> dict[str, Any]:
    """The facts of recurrent layers."""
    shape, layers = geometry.recurrent, geometry.recurrent_layers
    rollback = "replay" if shape is not None and worker == OURS else "snapshot"
    return {
        "recurrent_layers": layers,
        "recurrent_rollback": rollback if layers else None,
        "recurrent_state_bytes": sizes.state_bytes(shape) if shape else (None if layers else 0),
        "recurrent_snapshot_bytes": sizes.snapshot_bytes(shape, verify_block) if shape else None,
        "recurrent_replay_bytes": sizes.replay_bytes(shape, verify_block) if shape else None,
    }
