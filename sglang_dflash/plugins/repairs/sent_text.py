"""Fixes for streamed text that is sent twice."""

from __future__ import annotations

from typing import Any


def send_once(original: Any, detokenizer: Any, batch: Any) -> Any:
    """Around `DetokenizerManager._decode_batch_token_id_output`.

    If a text ends inside a character, the detokenizer sends only a part of it, up to a space or to
    a Chinese character. If the next text also ends inside a character, that part may be shorter
    than what was already sent; SGLang then moves its offset back, and sends the rest again. The
    offset is therefore never moved back.
    """
    status = detokenizer.decode_status
    before = {rid: status[rid].sent_offset for rid in batch.rids if rid in status}
    texts = original(detokenizer, batch)
    for rid, sent in before.items():
        if rid in status:
            status[rid].sent_offset = max(status[rid].sent_offset, sent)
    return texts


def end_without_text(original: Any, manager: Any, abort: Any) -> None:
    """Around `TokenizerManager._handle_abort_req`, which ends a request that waits in the queue,
    perhaps again: after a retraction, or because its step failed.

    Its last event has the whole text, but with --incremental-streaming-output an event holds new
    text only, and all text was sent.
    """
    state = manager.rid_to_state.get(abort.rid)
    original(manager, abort)
    if state is None or not manager.incremental_streaming_output:
        return
    if state.finished and getattr(state.obj, "stream", False):
        state.out_list[-1]["text"] = ""
