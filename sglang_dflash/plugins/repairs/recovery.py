"""A scheduler after a failed step: empty pools, and the requests in flight queued again.

What the failed step may have left half done is not trusted: every token of KV, draft KV and
recurrent state is computed again, results that were not processed yet are dropped, and grammars
are built from the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ReqKvInfo, ScheduleBatch
from sglang.srt.managers.scheduler import _make_abort_req

from sglang_dflash.common.log import Log
from sglang_dflash.patches.restored import restored

logger = Log(__name__)


def distinct(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Each request once, in the order in which they are found; without None."""
    found = {id(r): r for requests in lists for r in requests if r is not None}
    return list(found.values())


def in_flight(scheduler: Any, more: Iterable[Iterable[Any]]) -> list[Any]:
    """Requests that the scheduler holds, but for those whose grammar is being compiled.

    Args:
        more: requests that it held a moment ago.
    """
    batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
    batches += [batch for batch, _ in scheduler.result_queue]
    return distinct(
        [
            *(batch.reqs for batch in batches if batch is not None),
            [scheduler.chunked_req],
            *more,
            scheduler.waiting_queue,
        ]
    )


class Before(NamedTuple):
    """A request before a result is processed."""

    request: Any
    output: int
    reasoning: int
    sent: tuple[Any, ...]

    @classmethod
    def of(cls, request: Any) -> Before:
        sent = tuple(getattr(request, name) for name in SENT)
        return cls(request, len(request.output_ids), request.reasoning_tokens, sent)


# What SGLang notes of a request while it collects what it sends, once for a batch.
SENT = (
    "send_token_offset", "send_decode_id_offset", "send_output_token_logprobs_offset",
    "input_logprob_sent", "finished_output",
)  # fmt: skip

# Names of SGLang's code in the frames of an error: what collects the output of a batch, the loops
# over a result's requests, and their local that is the request.
COLLECTS = "_stream_output_generation"
RESULT_LOOPS, IN_LOOP = ("process_batch_result_prefill", "process_batch_result_decode"), "req"


def undo(before: Iterable[Before], frames: Mapping[str, Mapping[str, Any]]) -> None:
    """Make requests whole whose result was processed in part.

    Args:
        before: all of the batch.
        frames: of the error, the locals of each function by its name.
    """
    if COLLECTS in frames:
        # Nothing was sent: it failed while it was collected.
        for request, _, _, sent in before:
            for name, value in zip(SENT, sent, strict=True):
                setattr(request, name, value)
        return
    loops = (frames.get(method, {}) for method in RESULT_LOOPS)
    partly = next((found[IN_LOOP] for found in loops if IN_LOOP in found), None)
    for request, output, reasoning, sent in before:
        is_sent = tuple(getattr(request, name) for name in SENT) != sent
        kept_by_session = request.finished() and request.session is not None
        if request is partly and not is_sent and not kept_by_session:
            _cut(request, output, reasoning)


def _cut(request: Any, output: int, reasoning: int) -> None:
    """Drop output from that token on: whether it ends the request was perhaps not looked at.

    `reasoning`: how many tokens before it were of reasoning.
    """
    del request.output_ids[output:]
    request.reasoning_tokens = reasoning
    request.finished_reason = request.finished_len = None
    for name in request.logprob.__slots__ if request.return_logprob else ():
        values = getattr(request.logprob, name)
        if name.startswith("output_") and values is not None:
            del values[output:]


def recover(scheduler: Any, requests: list[Any], guilty: Collection[Any], reason: str) -> int:
    """End the guilty, queue the others, and empty the pools.

    Returns:
        How many requests were ended: the guilty, and those that cannot be continued.

    Raises:
        RuntimeError: SGLang does not empty its pools.
    """
    finished = [r for r in requests if r.finished()]
    queued, ended = [], sum(not _deliver(scheduler, request) for request in finished)
    for request in requests:
        if request.finished():
            continue
        lost = reason if request in guilty else _lost(scheduler, request)
        if lost is None:
            queued.append(request)
        else:
            _end(scheduler, request, lost)
            ended += 1
    _empty(scheduler)
    for request in queued:
        request.kv = ReqKvInfo()
        request.reset_for_retract()
        request.time_stats.set_wait_queue_entry_time()
    scheduler.waiting_queue = queued
    return ended


def end_unqueued(scheduler: Any, tokenized: Iterable[Any], reason: str) -> int:
    """End the requests of a received batch that were not queued. Returns how many."""
    queued = {r.rid for r in (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue)}
    lost = [one for one in tokenized if one.rid not in queued]
    for one in lost:
        params = one.session_params
        session = None if params is None else scheduler.session_controller.get(params.id)
        others = in_flight(scheduler, [scheduler.grammar_manager.grammar_queue])
        if session is not None and not any(r.session is session for r in others):
            # It may count the request as its active turn.
            session.abort_req()
        if session is not None and not session.streaming:
            session.req_nodes.pop(one.rid, None)
        error = FINISH_ABORT(reason, 500, "InternalServerError").to_json()
        scheduler.send_abort_output(AbortReq(rid=one.rid, finished_reason=error), one)
    return len(lost)


def _deliver(scheduler: Any, request: Any) -> bool:
    """Send what has finished, unless it was sent. Returns False if that fails: then it is ended."""
    session = request.session
    if session is not None and session.streaming and request.rid not in session.req_nodes:
        if isinstance(request.finished_reason, FINISH_ABORT):
            session.abort_req()
        else:
            request.output_ids = request.output_ids_through_stop
            session.finish_req(request)
    try:
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    except Exception as error:  # Of whatever a request asks for.
        _end(scheduler, request, f"The answer to this request cannot be sent: {error!r}")
        return False
    return True


def _lost(scheduler: Any, request: Any) -> str | None:
    """Return why a request cannot be continued, or None. Builds its grammar as of its output."""
    output = len(request.output_ids)
    what = None
    if request.beam_group is not None:
        what = "a beam search"
    elif request.return_hidden_states and (output or request.hidden_states):
        what = "a request with return_hidden_states"
    elif output and request.sampling_mask_rows is not None:
        what = "a request with return_sampling_mask"
    elif output and request.input_embeds is not None and request.return_logprob:
        what = "a request with input_embeds and return_logprob"
    elif request.return_logprob and len(request.logprob.output_token_logprobs_val) != output:
        what = "this request"
    if what is not None:
        return f"Another request failed, and {what} cannot be continued after that"
    if request.grammar is not None:
        try:
            _rebuild_grammar(scheduler.grammar_manager, request)
        except Exception as error:  # Of whichever grammar backend.
            logger.exception("no grammar for %s", request.rid)
            return f"Another request failed, and so did the grammar of this one: {error}"
    return None


def _rebuild_grammar(manager: Any, request: Any) -> None:
    """A drafted step may have advanced it beyond the output."""
    if manager.process_req_with_grammar(request):
        # It was flushed from the cache, and is compiled again.
        manager.grammar_queue.remove(request)
        request.grammar = request.grammar.result()
        manager._apply_request_reasoning_config(request)
    if request.input_embeds is not None:
        return  # Its output begins again.
    for token in request.output_ids:
        request.grammar.accept_token(token)


def _end(scheduler: Any, request: Any, reason: str) -> None:
    request.finished_reason = FINISH_ABORT(reason, 500, "InternalServerError")
    scheduler._release_aborted_request(request)
    scheduler.beam_coordinator.retire_group(request)
    error = request.finished_reason.to_json()
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=error), request)


def _empty(scheduler: Any) -> None:
    """Empty the pools, as /flush_cache does, but for grammars that are being compiled."""
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.last_batch = scheduler.cur_batch_for_debug = scheduler.chunked_req = None
    scheduler._pending_chunked_abort_req = None
    scheduler.waiting_queue = []
    scheduler.result_queue.clear()
    # Of a forward whose barrier was never set: the next one would take it for its own.
    scheduler.model_worker.last_shared_read_runner.shared_read_done_event = None
    manager = scheduler.grammar_manager
    with restored(manager, "grammar_queue"):
        manager.grammar_queue = []
        flushed = scheduler.flush_cache(empty_cache=False)
    if not flushed:
        raise RuntimeError("the pools cannot be emptied after a failed step")
