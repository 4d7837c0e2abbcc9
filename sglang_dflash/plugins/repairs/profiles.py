"""Errors of profiles that cannot be made, which would end SGLang's scheduler.

A profiler starts and stops in the scheduler, during its request or in a later step.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sglang.srt.managers.io_struct import ProfileReqOutput

from sglang_dflash.common.log import Log

logger = Log(__name__)


def report_failure(original: Any, manager: Any, request: Any) -> Any:
    """Around `SchedulerProfilerManager._profile`: answer HTTP 500 with the reason."""
    try:
        return original(manager, request)
    except Exception as error:  # Torch, CUDA, ROCm's profiler and the file system have their own.
        _give_up(manager)
        reason = f"no profile can be made: {type(error).__name__}: {error}"
        return ProfileReqOutput(success=False, message=reason)


def log_failure(original: Any, manager: Any, batch: Any) -> None:
    """Around `SchedulerProfilerManager._profile_batch_predicate`: log the failure in a step."""
    try:
        original(manager, batch)
    except Exception as error:
        _give_up(manager)
        logger.error("the profile was given up: %s: %s", type(error).__name__, error)


def _give_up(manager: Any) -> None:
    """Stop the profile, and start none in a later step."""
    if (profiler := getattr(manager, "torch_profiler", None)) is not None:
        with contextlib.suppress(Exception):  # The profiler may not have started.
            profiler.stop()
    manager.torch_profiler, manager.profile_in_progress = None, False
    manager.profile_by_stage = False
    manager.profiler_start_forward_ct = manager.profiler_target_forward_ct = None
