"""The end of child processes whose server ended while they started.

SGLang's children ask the kernel to end them with their parent (`kill_itself_when_parent_died`).
That has no effect if the parent has ended before: after SIGTERM while a server starts, a
detokenizer that is still importing would wait on its sockets forever.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any


def end_if_orphaned(*_: Any, **__: Any) -> None:
    """After `kill_itself_when_parent_died`: end this process if its parent is gone.

    Processes that call that function before they load plugins run this one when their main object
    is constructed.

    Raises:
        SystemExit: the parent is gone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit("the server ended while this process started")
