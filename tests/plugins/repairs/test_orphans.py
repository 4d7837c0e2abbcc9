"""A child of a server that ended while the child started."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from sglang_dflash.plugins.repairs.orphans import end_if_orphaned
from tests.patches.originals import original

SPAWN = multiprocessing.get_context("spawn")
ASK = "sglang.srt.utils.common.kill_itself_when_parent_died"


def _child(repaired: bool, news: Connection) -> None:
    """Run as a detokenizer whose imports have taken until the server ended."""
    news.send(os.getpid())
    parent: Any = multiprocessing.parent_process()
    parent.join(60)
    original(ASK)()
    try:
        if repaired:
            end_if_orphaned()
        news.send("waits for ever")
    except SystemExit as error:
        news.send(str(error))


def _server(repaired: bool, news: Connection) -> None:
    SPAWN.Process(target=_child, args=(repaired, news)).start()
    signal.pause()


def _told(repaired: bool) -> str:
    """Return the message of a child whose server got SIGTERM."""
    ours, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=_server, args=(repaired, theirs))
    server.start()
    assert ours.poll(60)
    ours.recv()
    server.terminate()
    server.join(60)
    assert server.exitcode == -signal.SIGTERM
    assert ours.poll(60)
    return ours.recv()


def test_a_child_outlives_the_server_without_the_rows() -> None:
    assert _told(repaired=False) == "waits for ever"
    assert _told(repaired=True) == "the server ended while this process started"


def test_a_process_with_a_parent_or_of_its_own_goes_on() -> None:
    end_if_orphaned()
    child = SPAWN.Process(target=end_if_orphaned)
    child.start()
    child.join(60)
    assert child.exitcode == 0
