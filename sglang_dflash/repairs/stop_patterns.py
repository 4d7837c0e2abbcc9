"""A limit on the time that the scheduler, which serves all requests, looks for one request's
`stop_regex`. Patterns such as `(x+x+)+y` take time that is exponential in the length of a text of
many x."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

# CPU seconds that all looks for a request may take: usual patterns need microseconds for a token.
FIRST, OF_A_TOKEN = 0.02, 0.001


class TooLong(Exception):
    """A look took longer than its limit."""


def find_in_time(original: Any, request: Any, *args: Any, **named: Any) -> bool:
    """Around `Req._check_str_based_finish`: the request ends with an error if its patterns have
    taken too long.

    Returns:
        Whether the request has ended.
    """
    patterns = request.sampling_params.stop_regex_strs
    if not patterns or threading.current_thread() is not threading.main_thread():
        return bool(original(request, *args, **named))
    spent = getattr(request, "dflash_stop_seconds", 0.0)
    allowed, began = FIRST + OF_A_TOKEN * len(request.output_ids), time.thread_time()
    try:
        with limit(max(allowed - spent, OF_A_TOKEN)):
            found = bool(original(request, *args, **named))
        spent += time.thread_time() - began
        # The timer ticks every few milliseconds: looks between two ticks are only counted here.
        if not found and spent > allowed:
            raise TooLong
        request.dflash_stop_seconds = spent
        return found
    except TooLong:
        problem = "to look for it takes too long; give a simpler pattern"
        request.finished_reason = FINISH_ABORT(
            f"stop_regex: {patterns}; {problem}", 400, "BadRequestError"
        )
        return True


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block after so many CPU seconds of this thread. Main thread only: the
    engine of `re` asks for signals while it searches, and for nothing else."""
    began = time.thread_time()

    def stop(_number: int, _frame: Any) -> None:
        # The timer's seconds are those of all threads of the process.
        left = seconds - (time.thread_time() - began)
        if left <= 0:
            raise TooLong
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, OF_A_TOKEN))

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
