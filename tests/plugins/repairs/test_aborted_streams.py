"""The last event of a streamed answer that is aborted while its request waits in the queue."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

from sglang_dflash.plugins.repairs.sent_text import end_without_text
from tests.patches.originals import original

HANDLE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
NO_TIMES: Any = SimpleNamespace(set_finished_time=lambda: None, get_e2e_latency=lambda: 1.0)


def last_event(stream: bool, incremental: bool, row: bool) -> dict[str, Any]:
    """The event after which nothing follows, of an answer of which "ab" was sent."""
    obj = GenerateReqInput(input_ids=[1], rid="r", stream=stream, sampling_params={})
    manager: Any = TokenizerManager.__new__(TokenizerManager)
    manager.incremental_streaming_output, manager.enable_lora = incremental, False
    manager.config_value = lambda _: "default"
    state = ReqState([], False, asyncio.Event(), obj, NO_TIMES, text="ab", output_ids=[3, 4])
    manager.rid_to_state = {"r": state}
    handle, abort = original(HANDLE), AbortReq(rid="r", finished_reason={"type": "abort"})
    end_without_text(handle, manager, abort) if row else handle(manager, abort)
    (event,) = state.out_list
    return event


def test_the_whole_text_is_sent_again_without_the_row() -> None:
    assert last_event(stream=True, incremental=True, row=False)["text"] == "ab"
    event = last_event(stream=True, incremental=True, row=True)
    assert event["text"] == "" and event["meta_info"]["finish_reason"] == {"type": "abort"}


@pytest.mark.parametrize(("stream", "incremental"), [(True, False), (False, True), (False, False)])
def test_an_event_with_the_whole_answer_has_its_text(stream: bool, incremental: bool) -> None:
    assert last_event(stream, incremental, row=True)["text"] == "ab"


def test_requests_that_are_gone_are_passed_over() -> None:
    manager = SimpleNamespace(rid_to_state={}, incremental_streaming_output=True)
    end_without_text(original(HANDLE), manager, AbortReq(rid="r"))
