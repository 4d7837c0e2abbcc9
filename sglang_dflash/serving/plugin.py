"""Entry point of `sglang.srt.plugins`: runs in every SGLang process, so it checks, registers and imports nothing heavy."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)


def register() -> None:
    """Hook our flags and our worker into SGLang, or say why not and leave it as it is."""
    # The one place that names the version is the dependency in pyproject.toml.
    wanted = next(
        r for r in importlib.metadata.requires("sglang-dflash") or () if r.startswith("sglang==")
    )
    found = importlib.metadata.version("sglang")
    if wanted != f"sglang=={found}":
        logger.error(
            "sglang-dflash needs %s, this is sglang==%s: SGLang's built-in DFLASH worker runs instead",
            wanted,
            found,
        )
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.serving import arguments, memory, metrics, request_fixes

    add = HookRegistry.register
    add("sglang.srt.server_args.ServerArgs.add_cli_args", arguments.add_flags, HookType.AFTER)
    add("sglang.srt.server_args.ServerArgs.from_cli_args", arguments.keep_flags, HookType.AFTER)
    add(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        _check_pair,
        HookType.BEFORE,
    )
    add(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        _create_worker,
        HookType.AROUND,
    )
    add(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        memory.draft_kv.pool_config,
        HookType.AROUND,
    )
    add(
        "sglang.srt.speculative.dflash_utils.scale_kv_cell_size_per_token_for_dflash",
        memory.draft_kv.cell_size,
        HookType.AROUND,
    )
    add(
        "sglang.srt.model_executor.pool_configurator._dflash_draft_cell_size",
        memory.draft_kv.draft_cell_size,
        HookType.AROUND,
    )
    request_fixes.register_hooks()
    state = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative"
    add(state, metrics.add_report, HookType.AFTER)
    # Engine(**kwargs) builds its arguments right after the plugins are loaded.
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        build = functools.partial(
            arguments.server_args_from_kwargs, engine.Engine.server_args_class
        )
        engine.Engine.server_args_class = staticmethod(build)


def _check_pair(server_args: Any) -> None:
    from sglang_dflash.serving.pairing import check_pair

    check_pair(server_args)


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    from sglang_dflash.serving.pairing import create_worker

    return create_worker(original, algorithm, server_args)
