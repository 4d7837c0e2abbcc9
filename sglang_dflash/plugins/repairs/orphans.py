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
    """End this process if its parent is gone. Runs after `kill_itself_when_parent_died`; processes
    that call that before they load plugins run it before they make their objects.

    Raises:
        SystemExit: it is.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit("the server ended while this process started")
