"""A child whose server ended before the child could ask to end with it.

SGLang's children have the kernel end them with their parent (`kill_itself_when_parent_died`), but
not if it has ended before: SIGTERM while a server starts ends it at once, and a detokenizer that is
still importing would wait for ever, in memory and on its sockets.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any


def end(*_: Any, **__: Any) -> None:
    """After `kill_itself_when_parent_died`, and before the objects of processes that call it before
    they load the plugins are made: end a process whose parent is gone.

    Raises:
        SystemExit: it is.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit("the server ended while this process started")
