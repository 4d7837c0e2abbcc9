"""A limit on the time that the scheduler, which serves all requests, looks for one request's
`stop_regex`. Patterns such as `(x+x+)+y` take time that is exponential in the length of a text of
many x."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

# Of one look. Usual patterns take microseconds.
SECONDS = 0.1


class TooLong(Exception):
    """A look took longer than its limit."""


def find_in_time(original: Any, request: Any, *args: Any, **named: Any) -> bool:
    """Around `Req._check_str_based_finish`: the request ends with an error if it takes too long.

    Returns:
        Whether the request has ended.
    """
    patterns = request.sampling_params.stop_regex_strs
    if not patterns or threading.current_thread() is not threading.main_thread():
        return bool(original(request, *args, **named))
    try:
        with limit(SECONDS):
            return bool(original(request, *args, **named))
    except TooLong:
        problem = f"to look for it took more than {SECONDS} s; give a simpler pattern"
        request.finished_reason = FINISH_ABORT(
            f"stop_regex: {patterns}; {problem}", 400, "BadRequestError"
        )
        return True


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block after so many seconds. Main thread only: the engine of `re` asks
    for signals while it searches, and for nothing else."""

    def stop(_number: int, _frame: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
