"""Our command-line flags, the aliases of the published commands, and their way into the scheduler process."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.core.options import RECURRENT_ROLLBACKS, Options

logger = logging.getLogger(__name__)

# SGLang keeps underscore attributes of its arguments apart from its own fields, and pickles them along.
ATTRIBUTE = "_sglang_dflash"

# The published commands' spelling -> SGLang 0.5.23's field.
ALIASES = {
    "speculative_dflash_draft_window_size": "speculative_draft_window_size",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}
# Exported before the published commands; SGLang 0.5.23 knows neither. The two others that they export, SGLANG_ENABLE_OVERLAP_PLAN_STREAM
# and SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN, it still reads itself.
RETIRED_VARIABLES = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2")
WORKERS = ("auto", "builtin")
DEFAULTS: dict[str, Any] = {
    "speculative_dflash_worker": "auto",
    "speculative_dflash_draft_kv_tokens": None,
    "speculative_dflash_recompute_tail": Options.recompute_tail,
    "speculative_dflash_recurrent_rollback": Options.recurrent_rollback,
}


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """Hook after SGLang has added its own flags."""
    group = parser.add_argument_group("sglang-dflash")
    group.add_argument(
        "--speculative-dflash-worker",
        choices=WORKERS,
        default=argparse.SUPPRESS,
        help="Which DFLASH worker serves: 'auto' takes that of sglang-dflash wherever it can, 'builtin' takes SGLang's own.",
    )
    group.add_argument(
        "--speculative-dflash-draft-kv-tokens",
        type=int,
        default=argparse.SUPPRESS,
        help="Entries of the draft KV cache when a draft window is set. Default: twice what the running requests can see.",
    )
    group.add_argument(
        "--speculative-dflash-recompute-tail",
        type=int,
        default=argparse.SUPPRESS,
        help="Cached prompt tokens, at most, that the target computes again when the bounded draft KV cache has lost them. Default: "
        f"{Options.recompute_tail}.",
    )
    group.add_argument(
        "--speculative-dflash-recurrent-rollback",
        choices=RECURRENT_ROLLBACKS,
        default=argparse.SUPPRESS,
        help="How recurrent layers of the target follow an accepted prefix: 'snapshot' keeps the state after every drafted token, "
        "'replay' keeps their inputs and folds the accepted ones in. Default: auto, replay for Gated DeltaNet layers.",
    )
    group.add_argument(
        "--speculative-dflash-draft-window-size",
        type=int,
        dest=ALIASES["speculative_dflash_draft_window_size"],
        default=argparse.SUPPRESS,
        help="Alias of --speculative-draft-window-size: committed tokens that the draft attends to.",
    )
    group.add_argument(
        "--mamba-scheduler-strategy",
        dest=ALIASES["mamba_scheduler_strategy"],
        default=argparse.SUPPRESS,
        help="Alias of --mamba-radix-cache-strategy.",
    )


def keep_flags(server_args: Any, _cls: type, namespace: argparse.Namespace) -> Any:
    """Hook after SGLang has built its arguments from the command line."""
    return _attach(
        server_args,
        {name: getattr(namespace, name) for name in DEFAULTS if hasattr(namespace, name)},
    )


def server_args_from_kwargs(original: Any, **kwargs: Any) -> Any:
    """`sglang.Engine(**kwargs)`: build SGLang's arguments with our own and the aliased ones taken out."""
    for alias, field in ALIASES.items():
        if alias in kwargs:
            kwargs[field] = kwargs.pop(alias)
    given = {name: kwargs.pop(name) for name in DEFAULTS if name in kwargs}
    return _attach(original(**kwargs), given)


def _attach(server_args: Any, given: dict[str, Any]) -> Any:
    if given.get("speculative_dflash_worker", "auto") not in WORKERS:
        raise ConfigError(
            f"speculative_dflash_worker: {given['speculative_dflash_worker']!r}; choose one of {WORKERS}"
        )
    setattr(server_args, ATTRIBUTE, given)
    return server_args


def tell_of_retired_variables() -> None:
    """One line on the variables of the published commands that are set and mean nothing any more."""
    found = [name for name in RETIRED_VARIABLES if name in os.environ]
    if found:
        logger.warning(
            "%s: SGLang no longer reads this. What it switched on is the default: speculative steps overlap with scheduling "
            "unless --disable-overlap-schedule is given",
            ", ".join(f"{name}={os.environ[name]}" for name in found),
        )


def wants_builtin(server_args: Any) -> bool:
    return _given(server_args)["speculative_dflash_worker"] == "builtin"


def options(server_args: Any, resolved: Any) -> Options:
    """`Options` from SGLang's resolved fields and ours. Raises ConfigError."""
    return Options(
        block_size=resolved.speculative_num_draft_tokens or resolved.speculative_dflash_block_size,
        window=resolved.speculative_draft_window_size,
        sinks=resolved.speculative_draft_sink_size or 0,
        draft_kv_tokens=_given(server_args)["speculative_dflash_draft_kv_tokens"],
        recompute_tail=_given(server_args)["speculative_dflash_recompute_tail"],
        recurrent_rollback=_given(server_args)["speculative_dflash_recurrent_rollback"],
    )


def _given(server_args: Any) -> dict[str, Any]:
    return {**DEFAULTS, **getattr(server_args, ATTRIBUTE, {})}
