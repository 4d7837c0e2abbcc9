"""What serving a pair takes: which worker serves it, and what its memory is spent on. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang_dflash.drafting.options import PLAIN_STEPS, Options, ResolvedOptions
from sglang_dflash.facts import sizes
from sglang_dflash.facts.attention import CAPABILITIES, choose_attention
from sglang_dflash.facts.command_line import spelled
from sglang_dflash.facts.draft_config import DraftConfig, draft_fields, draft_kv_shape
from sglang_dflash.facts.draft_memory import (
    DraftServer,
    NarrowForwards,
    default_captures,
    draft_memory,
    headroom,
)
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.pools import StateDemand, at_a_time, default_states, sglang_states
from sglang_dflash.facts.precision import other_precision
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.facts.server import BUILTIN, OURS
from sglang_dflash.facts.sizes import KV_DTYPES, GroupKV
from sglang_dflash.facts.target_config import TargetGeometry, kv_heads_of_rank
from sglang_dflash.inspect import words
from sglang_dflash.inspect.kv import GIB, StatePool, draft_groups, split_kv, state_pool
from sglang_dflash.inspect.pair import (
    Judged,
    context_of,
    describe_draft,
    describe_target,
    judge,
    other_target,
)
from sglang_dflash.inspect.serving import Serving

# Multiprocessors of an H100; SGLang's head dim of a target with latent attention.
_PROCESSORS, _LATENT_HEAD_DIM = 132, 256


def _longest(target: ModelFacts, config: DraftConfig | None, serving: Serving) -> int | None:
    """Tokens of a request, at most; None if that is not known. Raises ConfigError."""
    # Of a target whose context is not known the draft's is a guess.
    bounds = {
        "--context-length": serving.context_length,
        "max_position_embeddings of the target": context_of(target),
        "max_position_embeddings of the draft": config and config.max_position_embeddings,
    }
    bound, context = next(((by, most) for by, most in bounds.items() if most), ("", None))
    if serving.context is not None and context is not None and serving.context > context:
        required = (
            f"requests have up to {context} tokens ({bound}); give the --context-length of a "
        )
        raise ConfigError("context", serving.context, required + "server that extends it")
    return context


def inspect(
    target: ModelFacts,
    draft: ModelFacts,
    options: Options,
    serving: Serving,
    builtin: str | None = None,
) -> dict[str, Any]:
    """What serving this pair would cost.

    Args:
        builtin: the setting with which SGLang's worker serves; None without one.

    Returns:
        Every fact of docs/inspect.md by name, None if it is unknown; sizes are in bytes. Texts name
        the flags of `sglang-dflash inspect`.

    Raises:
        ConfigError: the pair or an option does not fit, a needed fact is unknown, or no memory is
            left for KV.
    """
    judged = judge(target, draft)
    if builtin is not None and judged.worker == OURS:
        judged = replace(judged, worker=BUILTIN, reason=builtin)
    geometry, config = judged.geometry, judged.config
    context = _longest(target, config, serving)
    resolved = replace(_resolve(options, draft, config), context=context)
    memory = _memory(target, draft, judged, resolved, serving)
    resolved.check_room(memory["target_tokens"])
    names = spelled(Options.__dataclass_fields__, verify_block="--block-size")
    notices = resolved.warnings(config, names) if config else []
    warnings = [*other_target(target.name, draft.name), *words.config_only(draft)]
    warnings += other_precision(target.name, target.config, draft.name, draft.config)
    warnings += words.extended(context_of(target), serving.context_length)
    warnings += words.capped(memory, serving.max_running_requests)
    facts = {
        "warnings": warnings + [str(found) for found in notices],
        "target": target.name,
        "draft": draft.name,
        "worker": judged.worker,
        "worker_reason": judged.reason,
        **describe_target(target, geometry),
        **describe_draft(draft, config),
        "block_size": resolved.verify_block,
        "window": resolved.reach.tokens,
        "sinks": resolved.reach.sinks,
        "max_running_requests": serving.max_running_requests,
        "tp_size": serving.tp_size,
        "context": serving.context,
        **_head_bytes(config, resolved.draft_block),
        "draft_tensors": len(draft.tensors) if config and draft.tensors else None,
        "draft_values": "finite" if config and draft.weights else None,
        **memory,
        "sources": [f"target: {target.source}", f"draft: {draft.source}"],
    }
    said = {"verdict": words.verdict(facts), "at_context": words.at_context(facts)}
    return {**said, "assumptions": _assumptions(serving), **facts}


def _memory(
    target: ModelFacts,
    draft: ModelFacts,
    judged: Judged,
    options: ResolvedOptions,
    serving: Serving,
) -> dict[str, Any]:
    """What the memory of one GPU is spent on. Raises ConfigError."""
    requests, ranks, config = serving.max_running_requests, serving.tp_size, judged.config
    part = replace(
        judged,
        geometry=judged.geometry.of_rank(ranks),
        config=config and sizes.draft_of_rank(config, ranks),
    )
    target_kv, draft_kv = _kv_bytes(draft, part, serving)
    recurrent = _recurrent(part.geometry, judged.worker, options.verify_block)
    steps = _step_bytes(judged, part.geometry, options, serving, draft_kv)
    of_target, of_draft = (
        None if one.weight_bytes is None else -(-one.weight_bytes // ranks)
        for one in (target, draft)
    )
    of_draft = sizes.draft_weight_bytes(part.config) if part.config else of_draft
    memory = _kv_memory(serving, of_target, of_draft, steps or 0)
    alone = _kv_memory(serving, of_target, 0, 0)
    groups = draft_groups(judged, options, draft_kv, requests)
    pool, snapshots, plain = _pools(
        serving, memory, steps or 0, alone, recurrent, [kv for _, kv in groups], target_kv, options
    )
    if pool is not None and plain is not None:
        memory, alone = memory - pool.total_bytes, alone - plain.total_bytes
        # A ring serves the requests that the states let run.
        groups = draft_groups(judged, options, draft_kv, pool.requests)
    facts = {
        "target_kv_bytes_per_token": target_kv,
        "draft_kv_bytes_per_token": draft_kv,
        "kv_memory_bytes": memory,
        "target_weight_bytes": of_target,
        "draft_weight_bytes": of_draft,
        "draft_step_bytes": steps,
        **recurrent,
        "recurrent_slots": pool and pool.slots,
        "running_requests": pool.requests if pool else requests,
        "running_requests_with_snapshots": snapshots and snapshots.requests,
        **split_kv(memory, target_kv, groups),
        "target_tokens_without_draft": alone // target_kv,
    }
    for suffix, states in {"": pool, "_unbounded": pool, "_without_draft": plain}.items():
        reserved = 1 if suffix == "_without_draft" else 2 * options.verify_block
        running, tokens = states.requests if states else requests, facts[f"target_tokens{suffix}"]
        facts[f"requests_at_context{suffix}"] = serving.context and at_a_time(
            tokens, running, serving.context, reserved
        )
    return {**facts, "memory_bytes": _divided(facts, pool and pool.total_bytes, serving)}


def _pools(
    serving: Serving,
    memory: int,
    steps: int,
    alone: int,
    recurrent: Mapping[str, Any],
    groups: Sequence[GroupKV],
    target_kv: int,
    options: ResolvedOptions,
) -> tuple[StatePool | None, StatePool | None, StatePool | None]:
    """Of recurrent states: as served, with SGLang's snapshots, and without a draft. None without
    such layers.

    Args:
        memory: bytes for it and both KV pools.
        steps: bytes of draft steps, which a server takes from K/V only.
        alone: the same without a draft.
        groups: of draft layers, with rings for all requests.
        target_kv: bytes of a token.

    Raises:
        ConfigError: it holds the states of no request.
    """
    requests = serving.max_running_requests
    state, replay = (recurrent[f"recurrent_{each}_bytes"] for each in ("state", "replay"))
    if not state or serving.kv_memory_gib is not None:
        return None, None, None
    # SGLang's sizing leaves room for a state per position, more than its snapshots take.
    snapshot = options.verify_block * state
    slots = sglang_states(memory + steps, state, snapshot)
    pool = snapshots = state_pool(slots, requests, state, 0, snapshot)
    if recurrent["recurrent_rollback"] == "replay":
        demand = StateDemand.of(
            groups,
            requests=requests,
            state=state,
            target_token=target_kv,
            context=options.context,
        )
        slots = default_states(memory + steps - (requests + 1) * replay, steps, demand)
        pool = state_pool(slots, requests, state, replay, 0)
    if not pool.requests:
        raise ConfigError(
            "memory_gib",
            serving.memory_gib,
            f"{memory / GIB:.2f} GiB beside weights and draft steps hold the recurrent states "
            f"of no request; give more, or fewer requests ({{max_running_requests}})",
        )
    return pool, snapshots, state_pool(sglang_states(alone, state), requests, state, 0, 0)


def _divided(
    facts: Mapping[str, Any], states: int | None, serving: Serving
) -> dict[str, int] | None:
    """A GPU's memory by what takes it: the parts sum to the whole. None if only that of the KV
    pools is known."""
    if serving.kv_memory_gib is not None:
        return None
    parts = {
        "target weights": facts["target_weight_bytes"],
        "draft weights": facts["draft_weight_bytes"],
        "draft steps": facts["draft_step_bytes"] or 0,
        "recurrent states": states or 0,
        "target KV": facts["target_tokens"] * facts["target_kv_bytes_per_token"],
        "draft KV": facts["draft_kv_bytes"],
    }
    return {**parts, "left to SGLang": int(serving.memory_gib * GIB) - sum(parts.values())}


def _resolve(options: Options, draft: ModelFacts, config: DraftConfig | None) -> ResolvedOptions:
    """With the draft's block size. Raises ConfigError if it is unknown and not given."""
    trained = None if config is None else config.block_size
    if config is None:
        fields = draft_fields(draft.config)
        trained = fields.positive_int("block_size") if "block_size" in fields else None
    return options.for_trained_block(trained)


def _kv_memory(serving: Serving, target: int | None, draft: int | None, steps: int) -> int:
    """Bytes for both KV pools and recurrent states: what weights and draft steps leave."""
    if serving.kv_memory_gib is not None:
        return int(serving.kv_memory_gib * GIB)
    if target is None or draft is None:
        unknown = "target" if target is None else "draft"
        raise ConfigError(
            "kv_memory_gib", None, f"required, because the size of the {unknown}'s weights is not "
            "known",
        )  # fmt: skip
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


def _step_bytes(
    judged: Judged, part: TargetGeometry, options: ResolvedOptions, serving: Serving, draft_kv: int
) -> int | None:
    """Bytes that our worker reserves for draft steps; None if another worker serves.

    Args:
        part: a rank's of the target.
        draft_kv: a rank's bytes of a token.

    Raises:
        ConfigError: the draft attention backend cannot serve the draft.
    """
    config, requests = judged.config, serving.max_running_requests
    if judged.worker != OURS or config is None:
        return None
    attention = choose_attention(
        serving.attention, config, "cuda", CAPABILITIES, serving.dtype_of_draft_kv
    )
    # MLA's queries, as SGLang counts them.
    head_dim = part.head_dim if part.latent_width is None else _LATENT_HEAD_DIM
    narrow = NarrowForwards(
        options.adaptive_widths()[:-1] if serving.width == "adaptive" else (),
        attention=(serving.target_attention,),
        query_width=part.num_attention_heads * head_dim,
        captured=default_captures(requests),
    )
    server = DraftServer(
        draft_block=options.draft_block,
        verify_block=options.verify_block,
        reach=options.reach,
        looks_up=options.looks_up,
        requests=requests,
        positions=(options.context or 0) + headroom(options.verify_block),
        ranks=serving.tp_size,
        itemsize=KV_DTYPES["bfloat16"],
        token_bytes=draft_kv,
        tagged=False,
        attention=CAPABILITIES[attention],
        processors=_PROCESSORS,
        recorded=requests if CAPABILITIES[attention].capturable else 0,
        waiting_steps=PLAIN_STEPS if narrow.widths else 0,
        narrow=narrow,
    )
    return draft_memory(config, server).total


def _head_bytes(config: DraftConfig | None, draft_block: int) -> dict[str, int | None]:
    """What the head of DFlash2 adds to what a proposal reads; None for what is not known."""
    if config is None:
        return dict.fromkeys(("draft_head_bytes", "draft_head_bytes_per_request"))
    once, per_request = sizes.head_bytes(config, draft_block, KV_DTYPES["bfloat16"])
    return {"draft_head_bytes": once, "draft_head_bytes_per_request": per_request}


def _kv_bytes(draft: ModelFacts, judged: Judged, serving: Serving) -> tuple[int, int]:
    """KV bytes of one token, of the target and of the draft."""
    itemsize = KV_DTYPES[serving.kv_dtype or "bfloat16"]
    of_target = sizes.target_kv_bytes(judged.geometry, itemsize)
    if judged.config:
        shape = judged.config.kv_shape
    else:
        layers, two, heads, dim = draft_kv_shape(draft_fields(draft.config))
        shape = (layers, two, kv_heads_of_rank("draft", heads, serving.tp_size), dim)
    return of_target, KV_DTYPES[serving.dtype_of_draft_kv] * math.prod(shape)


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


def _assumptions(serving: Serving) -> str:
    """What the figures are for, with the flags that change it."""
    memory = f"{serving.kv_memory_gib or 0:g} GiB for both KV pools (--kv-memory-gib)"
    if serving.kv_memory_gib is None:
        gpus = "one GPU" if serving.tp_size == 1 else f"each of {serving.tp_size} GPUs"
        memory = (
            f"{serving.memory_gib:g} GiB x {serving.mem_fraction:g} of {gpus} "
            "(--memory-gib, --mem-fraction, --tp-size)"
        )
    adaptive = f", adaptive width on {serving.target_attention} (--width, --attention-backend)"
    return (
        f"computed for {memory}, {serving.max_running_requests} running requests "
        f"(--max-running-requests), {serving.kv_dtype or 'bfloat16'} KV (--kv-dtype)"
        f"{adaptive if serving.width == 'adaptive' else ''}"
    )
