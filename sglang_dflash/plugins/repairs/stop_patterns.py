"""A limit on the time that the scheduler, which serves all requests, looks for one request's
`stop_regex`. Patterns such as `(x+x+)+y` take time that is exponential in the length of a text of
many x."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

# CPU seconds that all looks for a request may take: usual patterns need microseconds for a token.
FIRST, OF_A_TOKEN = 0.02, 0.001
T = TypeVar("T")


class TooLong(Exception):
    """A look took longer than its limit."""


def find_in_time(original: Any, request: Any, *args: Any, **named: Any) -> bool:
    """Around `Req._check_str_based_finish`: the request ends with an error if its patterns have
    taken too long on any rank.

    Returns:
        Whether the request has ended.
    """
    patterns = request.sampling_params.stop_regex_strs
    is_main = threading.current_thread() is threading.main_thread()
    if not patterns or not is_main or not _ranks_can_agree():
        return bool(original(request, *args, **named))
    spent = getattr(request, "dflash_stop_seconds", 0.0)
    allowed, began = FIRST + OF_A_TOKEN * len(request.output_ids), time.thread_time()
    try:
        limit = max(allowed - spent, OF_A_TOKEN)
        found = bool(within(limit, original, request, *args, **named))
        spent += time.thread_time() - began
    except TooLong:
        found, spent = False, inf
    request.dflash_stop_seconds = spent = _of_the_slowest_rank(spent)
    # The timer ticks every few milliseconds: looks between two ticks are only counted here.
    if spent < inf and (found or spent <= allowed):
        return found
    problem = "to look for it takes too long; give a simpler pattern"
    request.finished_reason = FINISH_ABORT(
        f"stop_regex: {patterns}; {problem}", 400, "BadRequestError"
    )
    # This rank may have found it in time.
    request.finished_len = None
    return True


def _ranks_can_agree() -> bool:
    """False where other ranks look at other times: pipeline and context parallelism. There a limit
    would let them part, and SGLang looks without one."""
    if not torch.distributed.is_initialized():
        return True
    parallel = get_parallel()
    return bool(parallel.pp_size == 1 and parallel.attn_cp_size == 1)


def _of_the_slowest_rank(seconds: float) -> float:
    """Every rank looks on a clock of its own. If one of them ended a request that the others go on
    with, their batches would differ, and the server would hang."""
    if not torch.distributed.is_initialized():
        return seconds
    ranks = get_parallel().attn_tp_group
    if ranks.world_size == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
    return float(slowest)


def within(seconds: float, look: Callable[..., T], *args: Any, **named: Any) -> T:
    """Call `look`. Main thread only: the engine of `re` asks for signals while it searches, and for
    nothing else.

    Raises:
        TooLong: it has taken so many CPU seconds of this thread.
    """
    began, looking = time.thread_time(), True

    def stop(_number: int, _frame: Any) -> None:
        # The timer's seconds are those of all threads of the process.
        left = seconds - (time.thread_time() - began)
        if looking and left <= 0:
            raise TooLong
        if looking:
            signal.setitimer(signal.ITIMER_VIRTUAL, max(left, OF_A_TOKEN))

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
