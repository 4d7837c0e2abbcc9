"""Patches of SGLang's scheduler: requests that it admits, and the tokens that they keep of a
step."""

from __future__ import annotations

from collections import deque
from typing import Any

from sglang_dflash.patches.restored import restored
from sglang_dflash.serving.metrics.counts import RequestStep
from sglang_dflash.serving.step.batch import get_spec, serves_dflash


def serve_hidden_states(original: Any, request: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`, which refuses `return_hidden_states` under overlap only."""
    del enable_overlap
    return original(request, False)


def admit_into_any_free_slot(
    original: Any, user_value: int | None, max_running_requests: int, *_: Any, **__: Any
) -> int | None:
    """Around `resolve_min_free_slots`: a threshold only if `--min-free-slots-delay` gives one.

    Our drafter has no prefill of its own: it projects hidden states of the target's.
    """
    return original(user_value, max_running_requests)


def leave_out_pause(scheduler: Any, _received: Any) -> None:
    """Before `Scheduler.continue_generation`: the time since the last step belongs to no step."""
    scheduler.draft_worker.dflash.stop_clocks()


def asks_no_token(request: Any) -> bool:
    """In place of `Req.is_prefill_only`, which is False beside any draft: whether the request is
    for log-probabilities of its prompt, and nothing is sampled for it."""
    return request.sampling_params.max_new_tokens == 0


def without_rows_after_the_end(
    original: Any, *, req: Any, hidden_states: Any, start: int, accept_len: int
) -> None:
    """Around `_append_decode_hidden_states`: a row per token that the answer keeps. (SGLang finds
    the last one itself.)"""
    if req.finished_len is not None and req.return_hidden_states != "last":
        accept_len -= len(req.output_ids) - req.finished_len
    original(req=req, hidden_states=hidden_states, start=start, accept_len=accept_len)


def without_last_token(is_cached: bool, sessions: Any, request: Any) -> bool:
    """After a turn of a streaming session: do not count its last token's KV as computed.

    That token may be the target's own after the accepted drafts, which no forward has read. The
    next turn then computes it.
    """
    if is_cached and serves_dflash():
        kv = sessions.slots[request.session.session_id].kv
        computed = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
        kv.kv_committed_len = min(kv.kv_committed_len, computed)
    return is_cached


def cut_last_turn(last_request: Any, *_: Any, **__: Any) -> None:
    """Before `Session._concat_token_arrays`: drop the tokens that the step which ended a turn has
    committed after its end. SGLang would put them into the next turn's prompt."""
    last_request.output_ids = last_request.output_ids_through_stop


def end_at_the_first_reason(original: Any, request: Any, new_accepted_len: int = 1) -> None:
    """Around `Req.update_finish_state`: judge the tokens of a step one after another, as if each
    were a step of plain decoding, until one ends the request.

    The request keeps all of them: SGLang cuts its output at `finished_len`.
    """
    if new_accepted_len < 2 or request.finished():
        original(request, new_accepted_len)
        return
    if not (_may_end_unseen(request) or _ends(original, request, new_accepted_len)):
        return
    output, grammar = request.output_ids, request.grammar
    tokens = deque(output[-new_accepted_len:])
    del output[-new_accepted_len:]
    with restored(request, "grammar"):
        try:
            while tokens and not request.finished():
                output.append(tokens.popleft())
                # The grammar has read them all, and if it has ended, then with the last.
                request.grammar = None if tokens else grammar
                original(request, 1)
        finally:
            output.extend(tokens)
    if request.finished():
        # SGLang has counted all tokens of the step. An answer begins with its reasoning.
        tokens_through_stop = len(request.output_ids_through_stop)
        request.reasoning_tokens = min(request.reasoning_tokens, tokens_through_stop)


def _may_end_unseen(request: Any) -> bool:
    """Return whether a stop may match the text up to some token, and not the text that goes on:
    with `$`, inside of a character (U+FFFD), or if decoding drops spaces before what follows."""
    params = request.sampling_params
    if params.stop_regex_strs:
        return True
    return bool(params.stop_strs) and (
        any("\ufffd" in stop for stop in params.stop_strs)
        or getattr(request.tokenizer, "clean_up_tokenization_spaces", True) is not False
    )


def _ends(original: Any, request: Any, new_accepted_len: int) -> bool:
    """Return whether the tokens of a step end a request, which stays as it was."""
    output, to_finish = request.output_ids, request.to_finish
    tokens = output[-new_accepted_len:]
    original(request, new_accepted_len)
    ends = request.finished()
    if ends:
        request.finished_reason = request.finished_len = None
        request.to_finish = to_finish
        output[-new_accepted_len:] = tokens
    return ends


def count_mixed_token(original: Any, processor: Any, batch: Any, result: Any) -> None:
    """Around the scheduler's processing of a prefill result: count the token that a mixed step has
    computed for a decoding request as committed also if its answer ends there.

    SGLang counts it if the answer goes on. Without extra buffers, the prefix cache takes over the
    recurrent state of a request that ends, which has read that token.
    """
    decoding = [r for r in batch.decoding_reqs or () if not (r.finished() or r.is_retracted)]
    for request in decoding:
        request.kv.kv_committed_len += 1
    try:
        original(processor, batch, result)
    finally:
        for request in decoding:
            if not request.finished():
                request.kv.kv_committed_len -= 1


def rate_of_proposed(original: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """Around `SchedulerMetricsReporter.report_decode_stats`, for the log and /metrics: divide
    accepted drafts by the drafts of the steps' own widths.

    SGLang divides by a whole block's drafts per step, and then begins to count anew.
    """
    correct, steps = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    proposed = reporter.spec_num_cap_tokens - steps
    of_whole_blocks = steps * (get_spec().speculative_num_draft_tokens - 1)
    reporter.spec_num_correct_drafts = correct * of_whole_blocks / proposed if proposed else 0
    try:
        original(reporter, *args, **kwargs)
    finally:
        if reporter.spec_num_forward_ct:
            # SGLang goes on counting: this step reported nothing, or failed before it did.
            reporter.spec_num_correct_drafts = correct


def rate_of_answer(result: None, manager: Any, meta_info: Any, received: Any, i: int) -> None:
    """After `TokenizerManager._calculate_spec_decoding_metrics`, the same for an answer."""
    del result, manager
    if "spec_verify_ct" in meta_info and received.spec_num_cap_tokens and serves_dflash():
        proposed = received.spec_num_cap_tokens[i] - meta_info["spec_verify_ct"]
        if proposed >= 0:
            correct = meta_info["spec_num_correct_drafts"]
            meta_info["spec_num_proposed_drafts"] = proposed
            meta_info["spec_accept_rate"] = correct / proposed if proposed else 0.0


def count_kept_tokens(original: Any, processor: Any, batch: Any, result: Any) -> None:
    """Around the scheduler's processing of a decode result: tell our worker what each live request
    got of it.

    SGLang itself skips requests that have finished or were retracted meanwhile, counts a step for
    the others (`spec_verify_ct`, which an answer's meta_info shows), and finds out how many of the
    accepted tokens they keep.
    """
    before = [(r.spec_verify_ct, r.spec_num_correct_drafts, len(r.output_ids)) for r in batch.reqs]
    original(processor, batch, result)
    # The running batch's `spec_info`, unless a later step has replaced it: the host now knows all
    # of its tokens.
    result.next_draft_input.in_flight = 0
    steps, outcome = [], {}
    for request, (step_count, correct, length), verified in zip(
        batch.reqs, before, result.cap_lens.tolist(), strict=True
    ):
        if request.spec_verify_ct == step_count:
            continue
        drafts, tokens = verified - 1, len(request.output_ids_through_stop) - length
        accepted = min(request.spec_num_correct_drafts - correct, tokens, drafts)
        steps.append(RequestStep(drafts, accepted, tokens))
        if drafts:
            outcome[request.rid] = accepted
    processor.model_worker.dflash.learn(steps, result.speculative_num_draft_tokens, outcome)
