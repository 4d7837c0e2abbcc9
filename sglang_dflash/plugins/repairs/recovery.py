"""Recovery of a scheduler after a failed step: empty the pools, queue the requests in flight again.

Nothing that the failed step may have left half done is trusted: K/V, draft K/V and recurrent states
are computed again, unprocessed results are dropped, and grammars are rebuilt from the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ReqKvInfo, ScheduleBatch
from sglang.srt.managers.scheduler import _make_abort_req

from sglang_dflash.common.log import Log
from sglang_dflash.patches.restored import restored

logger = Log(__name__)


def distinct(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Return each request once, in order, without None."""
    by_id = {id(r): r for requests in lists for r in requests if r is not None}
    return list(by_id.values())


def in_flight(scheduler: Any, more: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the scheduler's requests, except those whose grammar is still being compiled.

    Args:
        more: requests that it may have dropped since planning began.
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


class RequestSnapshot(NamedTuple):
    """The state of a request before a result is processed."""

    request: Any
    output: int
    reasoning: int
    sent: tuple[Any, ...]

    @classmethod
    def of(cls, request: Any) -> RequestSnapshot:
        sent = tuple(getattr(request, name) for name in SENT)
        return cls(request, len(request.output_ids), request.reasoning_tokens, sent)


# Attributes of a request that SGLang changes while it collects the output of a batch.
SENT = (
    "send_token_offset", "send_decode_id_offset", "send_output_token_logprobs_offset",
    "input_logprob_sent", "finished_output",
)  # fmt: skip

# Names in SGLang's code: the function that collects the output of a batch, the loops over the
# requests of a result, and the local variable in them that holds the request.
COLLECTS = "_stream_output_generation"
RESULT_LOOPS, IN_LOOP = ("process_batch_result_prefill", "process_batch_result_decode"), "req"


def undo(before: Iterable[RequestSnapshot], frames: Mapping[str, Mapping[str, Any]]) -> None:
    """Undo a result that was processed in part.

    Args:
        before: all requests of the batch.
        frames: local variables of each function in the error's traceback.
    """
    if COLLECTS in frames:
        # The step failed while output was collected, so none was sent.
        for request, _, _, sent in before:
            for name, value in zip(SENT, sent, strict=True):
                setattr(request, name, value)
        return
    loops = (frames.get(method, {}) for method in RESULT_LOOPS)
    partly = next((variables[IN_LOOP] for variables in loops if IN_LOOP in variables), None)
    for request, output, reasoning, sent in before:
        is_sent = tuple(getattr(request, name) for name in SENT) != sent
        kept_by_session = request.finished() and request.session is not None
        if request is partly and not is_sent and not kept_by_session:
            _cut(request, output, reasoning)


def _cut(request: Any, output: int, reasoning: int) -> None:
    """Drop the tokens from index `output` on: they may not have been checked for a stop.

    `reasoning`: the number of reasoning tokens before them.
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
        The number of ended requests: the guilty, and those that cannot be continued.

    Raises:
        RuntimeError: SGLang cannot empty its pools.
    """
    finished = [r for r in requests if r.finished()]
    queued, ended = [], sum(not _deliver(scheduler, request) for request in finished)
    for request in requests:
        if request.finished():
            continue
        lost = reason if request in guilty else _reason_lost(scheduler, request)
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
    """End the requests of a received batch that were not queued. Returns their number."""
    queued = {r.rid for r in (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue)}
    lost = [request for request in tokenized if request.rid not in queued]
    for request in lost:
        params = request.session_params
        session = None if params is None else scheduler.session_controller.get(params.id)
        running = in_flight(scheduler, [scheduler.grammar_manager.grammar_queue])
        if session is not None and not any(r.session is session for r in running):
            # The session may hold the request as its active turn.
            session.abort_req()
        if session is not None and not session.streaming:
            session.req_nodes.pop(request.rid, None)
        error = _failure(reason).to_json()
        scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=error), request)
    return len(lost)


def _deliver(scheduler: Any, request: Any) -> bool:
    """Send a finished request's answer if it was not sent. Ends the request and returns False if
    that fails."""
    session = request.session
    if session is not None and session.streaming and request.rid not in session.req_nodes:
        if isinstance(request.finished_reason, FINISH_ABORT):
            session.abort_req()
        else:
            request.output_ids = request.output_ids_through_stop
            session.finish_req(request)
    try:
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    except Exception as error:  # Any feature of the request may fail.
        _end(scheduler, request, f"The answer to this request cannot be sent: {error!r}")
        return False
    return True


def _reason_lost(scheduler: Any, request: Any) -> str | None:
    """Return why a request cannot be continued, or None. Rebuilds its grammar from its output."""
    output = len(request.output_ids)
    obstacle = None
    if request.beam_group is not None:
        obstacle = "a beam search"
    elif request.return_hidden_states and (output or request.hidden_states):
        obstacle = "a request with return_hidden_states"
    elif output and request.sampling_mask_rows is not None:
        obstacle = "a request with return_sampling_mask"
    elif output and request.input_embeds is not None and request.return_logprob:
        obstacle = "a request with input_embeds and return_logprob"
    elif request.return_logprob and len(request.logprob.output_token_logprobs_val) != output:
        obstacle = "this request"
    if obstacle is not None:
        return f"Another request failed, and {obstacle} cannot be continued after that"
    if request.grammar is not None:
        try:
            _rebuild_grammar(scheduler.grammar_manager, request)
        except Exception as error:  # Each grammar backend has its own errors.
            logger.exception("no grammar for %s", request.rid)
            return f"Another request failed, and so did the grammar of this one: {error}"
    return None


def _rebuild_grammar(manager: Any, request: Any) -> None:
    """Rebuild a grammar, which a drafted step may have advanced beyond the output."""
    if manager.process_req_with_grammar(request):
        # The grammar is no longer in the cache, and is compiled again.
        manager.grammar_queue.remove(request)
        request.grammar = request.grammar.result()
        manager._apply_request_reasoning_config(request)
    if request.input_embeds is not None:
        return  # Its output is generated again from the beginning.
    for token in request.output_ids:
        request.grammar.accept_token(token)


def _end(scheduler: Any, request: Any, reason: str) -> None:
    request.finished_reason = _failure(reason)
    scheduler._release_aborted_request(request)
    scheduler.beam_coordinator.retire_group(request)
    error = request.finished_reason.to_json()
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=error), request)


def _failure(reason: str) -> FINISH_ABORT:
    # A number that is no `HTTPStatus` would end a chat's stream without the error.
    return FINISH_ABORT(reason, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def _empty(scheduler: Any) -> None:
    """Empty the pools as /flush_cache does, but keep grammars that are being compiled."""
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.last_batch = scheduler.cur_batch_for_debug = scheduler.chunked_req = None
    scheduler._pending_chunked_abort_req = None
    scheduler.waiting_queue = []
    scheduler.result_queue.clear()
    # Left by a forward whose barrier never ran. The next barrier would wait for this event, and not
    # for its own forward.
    scheduler.model_worker.last_shared_read_runner.shared_read_done_event = None
    manager = scheduler.grammar_manager
    with restored(manager, "grammar_queue"):
        manager.grammar_queue = []
        flushed = scheduler.flush_cache(empty_cache=False)
    if not flushed:
        raise RuntimeError("the pools cannot be emptied after a failed step")
