"""A server that cannot be started ends with one line: our errors are shown without a traceback."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.log import Log

logger = Log(__name__)


def use_one_line() -> None:
    """Show ConfigErrors that end this process in one line, and Ctrl-C, after which it has shut
    down, in none. For processes that a command line started; a script that makes an `Engine` keeps
    its tracebacks."""
    before = sys.excepthook  # Packages that SGLang imports set one, too.

    def show(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ConfigError):
            print(f"sglang-dflash: {error}", file=sys.stderr, flush=True)
        elif not isinstance(error, KeyboardInterrupt):
            before(error_type, error, trace)

    sys.excepthook = show
    # SGLang logs it while an error ends the launcher, in front of our line.
    sglang_utils = logging.getLogger("sglang.srt.utils.common")
    sglang_utils.addFilter(
        lambda record: (
            record.funcName != "kill_process_tree" or not isinstance(sys.exception(), ConfigError)
        )
    )


@contextmanager
def ends_the_server(names: Mapping[str, str]) -> Iterator[None]:
    """In a scheduler process, a ConfigError ends the server as any error there does, by SIGQUIT to
    the parent (`sglang.srt.managers.scheduler.run_scheduler_process`), but logs one line.

    Elsewhere the error is raised.

    Args:
        names: setting -> what the user typed for it.
    """
    try:
        yield
    except ConfigError as error:
        if multiprocessing.parent_process() is None:
            raise
        logger.error("%s", error.named(names))
        os.kill(os.getppid(), signal.SIGQUIT)
        raise SystemExit(1) from error
