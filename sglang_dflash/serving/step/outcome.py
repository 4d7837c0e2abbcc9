"""What live requests keep of a decode step, from what SGLang's scheduler does with its result."""

from __future__ import annotations

from typing import Any

from sglang_dflash.serving.show.counts import RequestStep
from sglang_dflash.serving.step.target_tokens import takes_one_token


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
