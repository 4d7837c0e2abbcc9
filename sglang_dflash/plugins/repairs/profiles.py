"""A profile that cannot be made is an error of who asked for it: SGLang's scheduler ends.

A profiler starts and stops in the scheduler, with the request for it or in a later step.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sglang.srt.managers.io_struct import ProfileReqOutput

from sglang_dflash.common.log import Log

logger = Log(__name__)


def answer(original: Any, manager: Any, request: Any) -> Any:
    """Around `SchedulerProfilerManager._profile`: HTTP 500 with the reason."""
    try:
        return original(manager, request)
    except Exception as error:  # Of many types: of torch, CUDA, ROCm's profiler, the file system.
        _give_up(manager)
        reason = f"no profile can be made: {type(error).__name__}: {error}"
        return ProfileReqOutput(success=False, message=reason)


def follow(original: Any, manager: Any, batch: Any) -> None:
    """Around `SchedulerProfilerManager._profile_batch_predicate`: in a step, it is logged."""
    try:
        original(manager, batch)
    except Exception as error:
        _give_up(manager)
        logger.error("the profile was given up: %s: %s", type(error).__name__, error)


def _give_up(manager: Any) -> None:
    """No profile runs, and none begins in a later step."""
    if (profiler := getattr(manager, "torch_profiler", None)) is not None:
        with contextlib.suppress(Exception):  # It may not have started.
            profiler.stop()
    manager.torch_profiler, manager.profile_in_progress = None, False
    manager.profile_by_stage = False
    manager.profiler_start_forward_ct = manager.profiler_target_forward_ct = None
