"""A time limit for matching a request's `stop_regex`.

The scheduler, which serves all requests, does the matching. A pattern such as `(x+x+)+y` takes time
that is exponential in the number of x in the text.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import Any, TypeVar

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

# CPU seconds that matching for a request may take in all: at first, and per output token. Usual
# patterns need microseconds per token.
FIRST, OF_A_TOKEN = 0.02, 0.001
T = TypeVar("T")


class SearchTimeout(Exception):
    """Matching took longer than its limit."""


def match_in_time(original: Any, request: Any, *args: Any, **named: Any) -> bool:
    """Around `Req._check_str_based_finish`: end the request with an error if matching its patterns
    has taken too long on any rank.

    Returns:
        True if the request has ended.
    """
    patterns = request.sampling_params.stop_regex_strs
    is_main = threading.current_thread() is threading.main_thread()
    if not patterns or not is_main or not _ranks_can_agree():
        return bool(original(request, *args, **named))
    spent = getattr(request, "dflash_stop_seconds", 0.0)
    allowed, began = FIRST + OF_A_TOKEN * len(request.output_ids), time.thread_time()
    try:
        limit = max(allowed - spent, OF_A_TOKEN)
        is_stop = bool(within(limit, original, request, *args, **named))
        spent += time.thread_time() - began
    except SearchTimeout:
        is_stop, spent = False, inf
    request.dflash_stop_seconds = spent = _largest_over_ranks(spent)
    # The timer ticks every few milliseconds: shorter matches are limited by this sum only.
    if spent < inf and (is_stop or spent <= allowed):
        return is_stop
    problem = "matching takes too long; use a simpler pattern"
    request.finished_reason = FINISH_ABORT(
        f"stop_regex: {patterns}; {problem}", HTTPStatus.BAD_REQUEST, "BadRequestError"
    )
    # This rank may have found a match in time.
    request.finished_len = None
    return True


def _ranks_can_agree() -> bool:
    """Return False with pipeline and context parallelism. Their ranks match at different times, so
    that a limit could end a request on some of them only: there is none."""
    if not torch.distributed.is_initialized():
        return True
    parallel = get_parallel()
    return bool(parallel.pp_size == 1 and parallel.attn_cp_size == 1)


def _largest_over_ranks(seconds: float) -> float:
    """Return the maximum over tensor-parallel ranks, each of which measures its own time. If only
    one of them ended a request, their batches would differ and the server would hang."""
    if not torch.distributed.is_initialized():
        return seconds
    ranks = get_parallel().attn_tp_group
    if ranks.world_size == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
    return float(slowest)


def within(seconds: float, look: Callable[..., T], *args: Any, **named: Any) -> T:
    """Call `look` with a limit. Main thread only: signals are the only way to interrupt `re`.

    Raises:
        SearchTimeout: the call has taken `seconds` of this thread's CPU time.
    """
    began, looking = time.thread_time(), True

    def stop(_number: int, _frame: Any) -> None:
        # The timer counts the CPU time of all threads of the process.
        remaining = seconds - (time.thread_time() - began)
        if looking and remaining <= 0:
            raise SearchTimeout
        if looking:
            signal.setitimer(signal.ITIMER_VIRTUAL, max(remaining, OF_A_TOKEN))

    before = signal.signal(signal.SIGVTALRM, stop)
    # The signal may come between any two lines, and a context manager would have lines outside of
    # both blocks. The timer fires once: if `stop` raises in the inner `finally`, nothing follows;
    # in the outer one `looking` is False, and it does not raise.
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            return look(*args, **named)
        finally:
            looking = False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
