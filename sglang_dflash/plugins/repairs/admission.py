"""Limits for requests that SGLang would queue and never begin.

Such a request keeps all others behind it waiting, even on an idle server. `PrefillAdder` needs a
page more than a request's tokens, and one free slot. SGLang's `max_req_input_len` includes neither,
and `Scheduler.init_req_max_new_tokens` does not include what `add_one_req_ignore_eos` reserves.
Pools whose parts share bytes, and HiSparse, have other limits and are left to SGLang.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode, prepare_abort
from sglang.srt.managers.schedule_policy import (
    CLIP_MAX_NEW_TOKENS,
    IGNORE_EOS_RESERVE_TOKENS,
    AddReqResult,
)
from sglang.srt.mem_cache.prefill_budget import PrefillBudget, SWAPrefillBudget

from sglang_dflash.common.log import Log

logger = Log(__name__)


def limit_request(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler._add_request_to_queue`: refuse a prompt that an idle server cannot begin,
    with HTTP 400, and lower `max_new_tokens` if the request could not begin otherwise."""
    if scheduler.disaggregation_mode == DisaggregationMode.DECODE or request.to_finish is not None:
        return
    budget = _budget(scheduler)
    if budget is None:
        return
    params, tokens = request.sampling_params, len(request.origin_input_ids)
    page, capacity = _page_and_capacity(scheduler)
    if _reserves_answer(scheduler, request) and type(budget) is PrefillBudget:
        # A retracted request begins again with a partly filled last page.
        room = capacity - tokens - 2 * page - IGNORE_EOS_RESERVE_TOKENS
        params.max_new_tokens = max(0, min(params.max_new_tokens, room))
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
    longest = longest_prompt(scheduler, request, budget)
    if tokens > longest:
        request.set_finish_with_abort(
            f"Input length ({tokens} tokens) exceeds the maximum of {longest} tokens that can be "
            f"scheduled with a KV cache of {capacity} tokens and pages of {page}. Use a shorter "
            "input or a larger KV cache."
        )


def add_request(
    original: Any, adder: Any, request: Any, has_chunked_req: bool, *args: Any, **named: Any
) -> AddReqResult:
    """Around `PrefillAdder.add_one_req`: cut no second prompt in a prefill.

    The scheduler knows of one whose rest is to follow. It would answer the other from its first
    part. `add_one_req_ignore_eos` alone does not look for another: one that was cut to whole pages
    leaves less than a page of the chunk.
    """
    if has_chunked_req or adder.new_chunked_req is not None:
        tokens = len(request.full_untruncated_fill_ids) - request.prefix_len
        room = adder.rem_chunk_tokens
        by_pages = _reserves_answer(adder, request)
        if by_pages and room is not None and tokens > room:
            return AddReqResult.OTHER
    return original(adder, request, has_chunked_req, *args, **named)


def check_arrival(original: Any, queue: Any, request: Any) -> bool:
    """Around `DecodePreallocQueue._check_if_req_exceed_kv_capacity`: refuse a request that a decode
    server cannot begin. It reserves --num-reserved-decode-tokens behind the prompt.

    Returns:
        True if the request was refused.
    """
    if original(queue, request):
        return True
    needed, capacity = queue._prealloc_required_tokens(request)[0], queue.max_total_num_tokens
    # Some tokens of a retracted request were sent, so it is not refused.
    if needed <= capacity or request.output_ids or _budget(queue.scheduler) is None:
        return False
    message = (
        f"Input length ({len(request.origin_input_ids)} tokens) exceeds a KV cache of {capacity} "
        f"tokens, of which {queue.num_reserved_decode_tokens} are reserved for the answer. Use a "
        "shorter input, a larger KV cache or a lower --num-reserved-decode-tokens."
    )
    logger.error("%s, rid=%s", message, request.rid)
    prepare_abort(request, message, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([request], request.return_logprob)
    return True


def longest_prompt(scheduler: Any, request: Any, budget: PrefillBudget) -> int:
    """The number of tokens of the longest prompt that `PrefillAdder` takes on an idle server.

    Args:
        budget: free tokens of the pools.
    """
    page, capacity = _page_and_capacity(scheduler)
    by_pages = _reserves_answer(scheduler, request)
    # A prefill server generates one token, whatever the request asks for.
    prefills = scheduler.disaggregation_mode == DisaggregationMode.PREFILL
    answer = 1 if prefills else min(request.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
    longest = capacity - page
    if not by_pages:
        longest -= answer + 1
    elif prefills and type(budget) is PrefillBudget:
        longest = (longest - answer - IGNORE_EOS_RESERVE_TOKENS - 1) // page * page
    slides = isinstance(budget, SWAPrefillBudget) and not budget.req_ring
    if slides and scheduler.chunked_prefill_size is None and _has_no_prefixes(scheduler):
        # The sliding layers' pool holds the whole prompt until it is computed. With a prefix cache
        # it may hold only the window of a cached prefix, so there is no such limit.
        sliding = scheduler.token_to_kv_pool_allocator.size_swa - page
        longest = min(longest, sliding if by_pages else (sliding - 1) // page * page)
    return longest


def _budget(scheduler: Any) -> PrefillBudget | None:
    """The free tokens of the pools; None if these share bytes, or part of them is host memory."""
    budget = scheduler.token_to_kv_pool_allocator.create_prefill_budget(scheduler.tree_cache)
    served = type(budget) in (PrefillBudget, SWAPrefillBudget) and not scheduler.enable_hisparse
    return budget if served else None


def _reserves_answer(owner: Any, request: Any) -> bool:
    """Return whether `PrefillAdder.add_one_req_ignore_eos` judges the request; see
    `_has_no_prefixes`."""
    return request.sampling_params.ignore_eos and _has_no_prefixes(owner)


def _has_no_prefixes(owner: Any) -> bool:
    """Return whether the `tree_cache` of a scheduler or a `PrefillAdder` keeps no prefixes."""
    return getattr(owner.tree_cache, "disable", True)


def _page_and_capacity(scheduler: Any) -> tuple[int, int]:
    """Tokens of a page, and of the whole pool."""
    shards = scheduler.kv_shard_widening
    return scheduler.page_size * shards, scheduler.max_total_num_tokens * shards
