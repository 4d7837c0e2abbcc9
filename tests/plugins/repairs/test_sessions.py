"""A turn that replaces all turns of a session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.session.session_controller import Session

from sglang_dflash.plugins.repairs.sessions import forget_turns
from tests.patches.originals import original

CREATE = "sglang.srt.session.session_controller.Session.create_req"


def turn(session: Session, name: str, row: bool = True, **params: Any) -> Any:
    """Ask for a turn of two tokens. It runs on, but others may follow it."""
    asked = MagicMock(rid=name, input_ids=[1, 2], session_params=SessionParams(**params))

    def made(**fields: Any) -> Any:
        later = {"finished": lambda: True, "inherit_mm_token_counts": lambda _: None}
        answer = {"output_ids": [], "finished_reason": None, "to_finish": None}
        return SimpleNamespace(**fields, **later, **answer, multimodal_inputs=None)

    if row:
        forget_turns(session, asked, None, 9)
    return original(CREATE)(session, asked, None, 9, req_factory=made)


def test_all_turns_are_replaced() -> None:
    session = Session(99)
    before = [turn(session, "a"), turn(session, "b", rid="a"), turn(session, "c")]
    last = turn(session, "d", replace=True)
    assert list(session.req_nodes) == ["d"] and last.origin_input_ids == [1, 2]
    assert all(one.to_finish is not None for one in before)
    assert turn(session, "e", rid="d").origin_input_ids == [1, 2, 1, 2]


def test_other_turns_stay() -> None:
    session = Session(99)
    turn(session, "a")
    turn(session, "b", rid="a")
    turn(session, "c", rid="a", replace=True)
    assert list(session.req_nodes) == ["a", "c"]


def test_a_replacement_of_all_turns_fails_without_the_row() -> None:
    session = Session(99)
    turn(session, "a")
    with pytest.raises(RuntimeError, match="dictionary changed size"):
        turn(session, "b", row=False, replace=True)
