"""Log-probabilities of requests with `max_new_tokens` of 0."""

from __future__ import annotations

from typing import Any


def drop_output_logprobs(
    count: int, processor: Any, i: int, request: Any, *_args: Any, **_kwargs: Any
) -> int:
    """After `SchedulerLogprobResultProcessor.add_logprob_return_values`: drop the output token's.

    If a prefill has other requests that want tokens, one is sampled for this request, too.
    """
    del processor, i
    if request.sampling_params.max_new_tokens == 0:
        request.logprob.output_token_logprobs_val.clear()
        request.logprob.output_token_logprobs_idx.clear()
    return count
