"""Choice of the worker for a pair: ours, or SGLang's built-in one if ours cannot serve it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_spec

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import UnsupportedDraft
from sglang_dflash.common.log import Log
from sglang_dflash.common.machine import version
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.patches.patch import install_late, verify
from sglang_dflash.serving.gpu.backends import asked_attention
from sglang_dflash.serving.metrics.labels import metric_labels
from sglang_dflash.serving.metrics.series import show_info
from sglang_dflash.serving.metrics.server_info import BUILTIN, labels
from sglang_dflash.serving.patches import BUILTIN_PATCHES, PATCHES
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.start.draft_files import dummy_weights, local_folder
from sglang_dflash.serving.start.one_line_errors import ends_the_server
from sglang_dflash.serving.start.unserved import BUILTIN_FLAG, builtin_reason

logger = Log(__name__)


def create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """Around SGLang's choice of the speculative worker's class, in the scheduler process."""
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    builtin = functools.partial(original, algorithm, server_args)
    if flags.ServerFlags.of(server_args).worker == "builtin":
        logger.info("SGLang's built-in worker, as requested by %s", BUILTIN_FLAG)
        return builtin_worker(builtin(), BUILTIN_FLAG)
    settings = resolving_view(server_args)
    folder = local_folder(settings)
    reason = unserved(server_args, settings, folder)
    if reason is not None:
        return fall_back(builtin, reason)
    load_draft = functools.partial(load_model, folder, dummy=dummy_weights(settings))
    return functools.partial(choose_late, builtin, load_draft)


def choose_late(
    builtin: Callable[[], type],
    load_draft: Callable[..., DraftModel],
    *,
    server_args: Any,
    gpu_id: int,
    nccl_port: int,
    target_worker: Any,
) -> Any:
    """Build our worker, or SGLang's. SGLang calls it as the worker's class, when all plugins have
    run and the target is loaded: only then can the target's lm_head be examined.

    Args:
        builtin: imports SGLang's worker and returns its class.
        load_draft: see `DFlashSpecWorker`.
    """
    # The launching process, which checks the pair, does not need these modules.
    from sglang_dflash.serving.start.build import DFlashSpecWorker
    from sglang_dflash.serving.start.target_head import unserved_target

    verify(PATCHES)
    reason = unserved_target(target_worker.model_runner.model)
    if reason is None:
        return DFlashSpecWorker(server_args, target_worker, load_draft)
    return fall_back(builtin, reason)(
        server_args=server_args,
        gpu_id=gpu_id,
        nccl_port=nccl_port,
        target_worker=target_worker,
    )


def fall_back(builtin: Callable[[], type], reason: str) -> type:
    """Return the class of SGLang's worker, and log why it serves."""
    logger.warning(
        "SGLang's built-in worker serves instead of sglang-dflash's, because of %s", reason
    )
    return builtin_worker(builtin(), reason)


def builtin_worker(theirs: type, reason: str) -> type:
    """Return SGLang's class with the reason why it serves, for `figures.add_report` and
    /metrics."""

    class Builtin(theirs):
        builtin_reason = reason

        def __init__(self, *args: Any, **named: Any) -> None:
            install_late(BUILTIN_PATCHES, "its own DFLASH worker")
            with ends_the_server({}):
                super().__init__(*args, **named)
            spec = get_spec()
            report = {
                "block_size": spec.speculative_num_draft_tokens,
                "window": spec.speculative_draft_window_size,
                "version": version("sglang-dflash"),
            }
            show_info(metric_labels(), {**labels(report), "worker": BUILTIN})

    return Builtin


def unserved(server_args: Any, settings: Any, folder: str) -> str | None:
    """Return the draft feature or server setting that only SGLang's own worker serves, or None."""
    try:
        DraftConfig.from_pretrained(folder)
    except UnsupportedDraft as reason:
        return str(reason)
    return builtin_reason(settings, asked_attention(server_args))
