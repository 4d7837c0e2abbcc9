"""Log-probabilities of a request for no token (`max_new_tokens` of 0)."""

from __future__ import annotations

from typing import Any


def without_output(
    count: int, processor: Any, i: int, request: Any, *_args: Any, **_kwargs: Any
) -> int:
    """After `SchedulerLogprobResultProcessor.add_logprob_return_values`: no output token, whatever
    else is in the batch. In a prefill with requests for tokens, one is sampled for this one, too.
    """
    del processor, i
    if request.sampling_params.max_new_tokens == 0:
        request.logprob.output_token_logprobs_val.clear()
        request.logprob.output_token_logprobs_idx.clear()
    return count
