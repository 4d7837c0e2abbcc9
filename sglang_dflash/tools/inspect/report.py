"""The worker that serves a pair, and the division of its memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sglang_dflash.checkpoint.draft_config import DraftConfig, draft_fields
from sglang_dflash.checkpoint.precision import other_precision
from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.checkpoint.target_config import context_of
from sglang_dflash.common.command_line import spelled
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.memory import sizes
from sglang_dflash.memory.sizes import KV_DTYPES
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS
from sglang_dflash.tools.inspect import words
from sglang_dflash.tools.inspect.memory import memory_of
from sglang_dflash.tools.inspect.pair import (
    ServingDecision,
    decide_worker,
    describe_draft,
    describe_target,
    other_target,
)
from sglang_dflash.tools.inspect.serving import Serving


def _longest(target: ModelFacts, config: DraftConfig | None, serving: Serving) -> int | None:
    """Tokens of a request, at most; None if that is not known. Raises ConfigError."""
    # Of a target whose context is not known the draft's is a guess.
    bounds = {
        "--context-length": serving.context_length,
        "the target's context": context_of(target.config),
        "max_position_embeddings of the draft": config and config.max_position_embeddings,
    }
    bound, context = next(((by, most) for by, most in bounds.items() if most), ("", None))
    if serving.context is not None and context is not None and serving.context > context:
        required = (
            f"requests have up to {context} tokens ({bound}); give the --context-length of a "
        )
        raise ConfigError("context", serving.context, required + "server that extends it")
    return context


def decide_pair(
    target: ModelFacts,
    draft: ModelFacts,
    options: Options,
    serving: Serving,
    builtin: str | None,
) -> tuple[ServingDecision, ResolvedOptions]:
    """Return the worker that serves a pair, and the options resolved for its draft. Raises
    ConfigError.

    Args:
        builtin: the setting with which SGLang's worker serves; None without one.
    """
    decision = decide_worker(target, draft)
    if builtin is not None and decision.worker == OURS:
        decision = replace(decision, worker=BUILTIN, reason=builtin)
    context = _longest(target, decision.config, serving)
    return decision, replace(_resolve(options, draft, decision.config), context=context)


def inspect(
    target: ModelFacts,
    draft: ModelFacts,
    options: Options,
    serving: Serving,
    builtin: str | None = None,
) -> dict[str, Any]:
    """Return what serving this pair would cost.

    Args:
        builtin: the setting with which SGLang's worker serves; None without one.

    Returns:
        Every fact of docs/inspect.md by name, None if it is unknown; sizes are in bytes. Texts name
        the flags of `sglang-dflash inspect`.

    Raises:
        ConfigError: the pair or an option does not fit, a needed fact is unknown, or no memory is
            left for KV.
    """
    decision, resolved = decide_pair(target, draft, options, serving, builtin)
    geometry, config = decision.geometry, decision.config
    memory = memory_of(target, draft, decision, resolved, serving)
    resolved.check_room(memory["target_tokens"])
    names = spelled(Options.__dataclass_fields__, verify_block="--block-size")
    findings = resolved.warnings(config, names) if config else []
    warnings = [*other_target(target.name, draft.name), *words.config_only(draft)]
    warnings += words.earlier_revision(draft.name)
    warnings += other_precision(target.name, target.config, draft.name, draft.config)
    of_draft = None if config is None else config.max_position_embeddings
    warnings += words.extended(serving.context_length, context_of(target.config), of_draft)
    warnings += words.capped(memory, serving.max_running_requests)
    facts = {
        "warnings": warnings + [str(finding) for finding in findings],
        "target": target.name,
        "draft": draft.name,
        "worker": decision.worker,
        "worker_reason": decision.reason,
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
        **_with_builtin_worker(target, draft, decision, resolved, serving, memory),
        "sources": [f"target: {target.source}", f"draft: {draft.source}"],
    }
    summary = {"verdict": words.verdict(facts), "at_context": words.at_context(facts)}
    return {**summary, "assumptions": _assumptions(serving), **facts}


def _with_builtin_worker(
    target: ModelFacts,
    draft: ModelFacts,
    decision: ServingDecision,
    options: ResolvedOptions,
    serving: Serving,
    served: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the KV tokens and the requests with SGLang's worker, and the gain over it.

    Args:
        served: the memory with the worker that serves.
    """
    counts = ("target_tokens", "running_requests", "requests_at_context")
    theirs: Mapping[str, Any] = dict.fromkeys(counts, 0)
    # If its snapshots do not fit, it would not start.
    with suppress(ConfigError):
        theirs = memory_of(target, draft, replace(decision, worker=BUILTIN), options, serving)
    tokens = theirs["target_tokens"]
    return {
        **{f"{name}_builtin": theirs[name] for name in counts},
        "target_tokens_gain": served["target_tokens"] / tokens - 1 if tokens else None,
    }


def _resolve(options: Options, draft: ModelFacts, config: DraftConfig | None) -> ResolvedOptions:
    """Resolve the options with the draft's block size. Raises ConfigError if it is unknown and not
    given."""
    trained = None if config is None else config.block_size
    if config is None:
        fields = draft_fields(draft.config)
        trained = fields.positive_int("block_size") if "block_size" in fields else None
    return options.for_trained_block(trained)


def _head_bytes(config: DraftConfig | None, draft_block: int) -> dict[str, int | None]:
    """Return the bytes that the draft's head adds to the reads of a proposal; None for unknown
    ones."""
    if config is None:
        return dict.fromkeys(("draft_head_bytes", "draft_head_bytes_per_request"))
    once, per_request = sizes.head_bytes(config, draft_block, KV_DTYPES["bfloat16"])
    return {"draft_head_bytes": once, "draft_head_bytes_per_request": per_request}


def _assumptions(serving: Serving) -> str:
    """Return the assumptions behind the figures, with the flags that change them."""
    memory = f"{serving.kv_memory_gib or 0:g} GiB for both KV pools (--kv-memory-gib)"
    if serving.kv_memory_gib is None:
        gpus = "one GPU" if serving.tp_size == 1 else f"each of {serving.tp_size} GPUs"
        card = ", an 80 GB card has about 79" if serving.memory_gib == Serving.memory_gib else ""
        memory = (
            f"{serving.memory_gib:g} GiB x {serving.mem_fraction:g} of {gpus} "
            f"(--memory-gib{card}; --mem-fraction, --tp-size)"
        )
    adaptive = f", adaptive width on {serving.target_attention} (--width, --attention-backend)"
    return (
        f"computed for {memory}, {serving.max_running_requests} running requests "
        f"(--max-running-requests), {serving.kv_dtype or 'bfloat16'} KV (--kv-dtype)"
        f"{adaptive if serving.width == 'adaptive' else ''}"
    )
