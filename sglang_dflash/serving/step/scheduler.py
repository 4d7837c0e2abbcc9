"""Around SGLang's scheduler: requests that it is to refuse, and what live ones keep of a step."""

from __future__ import annotations

from typing import Any

from sglang_dflash.serving.show.counts import RequestStep
from sglang_dflash.serving.step.batch import serves_dflash
from sglang_dflash.serving.step.target_tokens import takes_one_token


def refuse_hidden_states(original: Any, request: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: refuse `return_hidden_states` without overlap too."""
    del enable_overlap
    return original(request, True)


def without_last_token(kept: bool, sessions: Any, request: Any) -> bool:
    """After a turn of a streaming session: do not count its last token's KV as computed.

    That token may be the target's own after the accepted drafts, which no forward has read. The
    next turn then computes it.
    """
    if kept and serves_dflash():
        kv = sessions.slots[request.session.session_id].kv
        computed = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
        kv.kv_committed_len = min(kv.kv_committed_len, computed)
    return kept


def count_kept_tokens(original: Any, processor: Any, batch: Any, result: Any) -> None:
    """Around the scheduler's processing of a decode result: tell our worker what each live request
    got of it.

    SGLang itself skips requests that have finished or were retracted meanwhile, counts a step for
    the others (`spec_verify_ct`, which an answer's meta_info shows), and finds out how many of the
    accepted tokens they keep.
    """
    worker = getattr(processor.model_worker, "dflash", None)
    if worker is None:
        original(processor, batch, result)
        return
    before = [(r.spec_verify_ct, r.spec_num_correct_drafts, len(r.output_ids)) for r in batch.reqs]
    original(processor, batch, result)
    steps, outcome, width = [], {}, result.speculative_num_draft_tokens
    for request, (step_count, correct, length) in zip(batch.reqs, before, strict=True):
        if request.spec_verify_ct == step_count:
            continue
        takes_drafts = not takes_one_token(request)
        drafts = width - 1 if takes_drafts else 0
        tokens = len(request.output_ids_through_stop) - length
        accepted = min(request.spec_num_correct_drafts - correct, tokens, drafts)
        steps.append(RequestStep(drafts, accepted, tokens))
        if takes_drafts:
            outcome[request.rid] = accepted
    worker.learn(steps, width, outcome)
