"""A turn of a session that replaces all turns before it."""

from __future__ import annotations

from typing import Any


def forget_turns(session: Any, request: Any, *_args: Any, **_named: Any) -> None:
    """Before `Session.create_req`: drop the session's turns if `request` replaces all of them, that
    is with `replace` and without `rid`. Those that run are aborted.

    SGLang removes them from the dictionary over which it iterates, which raises RuntimeError.
    """
    params = request.session_params
    if params.replace and params.rid is None and not session.streaming:
        for turn in session.req_nodes.values():
            turn.abort()
        session.req_nodes.clear()
