"""Requests that SGLang's own prefill begins on an idle server, and those that are refused."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.runtime_context import get_context

from sglang_dflash.plugins.repairs.admission import add_request, check_arrival, limit_request
from tests.patches.originals import original

POOL, SLIDING, WINDOW = 128, 80, 16
# What `get_worker_info` makes of the pool: a prompt has to be shorter.
LIMIT = POOL - 6
EXCEEDS = "sglang.srt.disaggregation.decode.DecodePreallocQueue._check_if_req_exceed_kv_capacity"


@pytest.fixture(autouse=True)
def _published() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class Pool(PagedTokenToKVPoolAllocator):
    """An empty pool."""

    def __init__(self, page: int) -> None:
        super().__init__(POOL, page, torch.float32, "cpu", None, need_sort=False)  # type: ignore[arg-type]


class SlidingPool(SWATokenToKVPoolAllocator):
    """An empty pool, and one of the sliding layers."""

    def __init__(self, page: int) -> None:
        self.page_size, self._swa_req_ring, self._size_swa = page, False, SLIDING

    def full_available_size(self) -> int:
        return POOL

    def swa_available_size(self) -> int:
        return SLIDING


class Tree:
    """A prefix cache that holds nothing."""

    sliding_window_size = WINDOW
    full_evictable_size = swa_evictable_size = evictable_size = lambda _: 0
    supports_mamba = supports_prefix_sharing = lambda _: False
    buffer_pipeline = None

    def __init__(self, disable: bool) -> None:
        self.disable = disable

    def lock(self, _node: Any) -> Any:
        return nullcontext()

    def unlock(self, _lock: Any) -> None:
        pass


class Request:
    """A fake of SGLang's `Req`: the attributes that are read."""

    swa_host_hit_length = host_hit_length = auxiliary_swa_host_hit_length = prefix_len = 0
    retracted_stain = return_logprob = False
    last_node = rid = None
    to_finish: Any = None
    extend_end: int

    def __init__(self, tokens: int, answer: int, ignore_eos: bool) -> None:
        self.origin_input_ids, self.output_ids = array("q", range(tokens)), array("q")
        self.sampling_params = SimpleNamespace(
            max_new_tokens=answer, min_new_tokens=0, ignore_eos=ignore_eos
        )
        self.kv = SimpleNamespace(holds_mamba=False, req_pool_idx=None)

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def needs_host_load_back(self) -> bool:
        return False

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message


def scheduler(
    page: int, cached: bool, chunk: int | None, sliding: bool = False, **changes: Any
) -> Any:
    given = {
        "disaggregation_mode": DisaggregationMode.NULL, "token_to_kv_pool_allocator":
        (SlidingPool if sliding else Pool)(page), "tree_cache": Tree(not cached),
        "max_total_num_tokens": POOL, "kv_shard_widening": 1, "page_size": page,
        "chunked_prefill_size": chunk, "max_req_len": POOL - 1, "max_new_tokens_limit": None,
        "sliding_window_size": WINDOW, "enable_hisparse": False,
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


class Adder(PrefillAdder):
    def _account_prefill_cache_admission(self, *_: Any) -> None:
        pass


def adder_of(scheduler: Any) -> Adder:
    return Adder(
        scheduler.page_size, scheduler.tree_cache, scheduler.token_to_kv_pool_allocator,
        running_batch=None, new_token_ratio=1.0, rem_input_tokens=10**6,
        rem_chunk_tokens=scheduler.chunked_prefill_size,
    )  # fmt: skip


def begins(scheduler: Any, request: Request) -> bool:
    adder = adder_of(scheduler)
    adder.add_one_req(request, False, None)  # type: ignore[arg-type]
    return bool(adder.can_run_list)


@pytest.mark.parametrize("sliding", (False, True), ids=("", "sliding"))
@pytest.mark.parametrize("chunk", (None, 64), ids=("whole", "chunks"))
@pytest.mark.parametrize("cached", (True, False), ids=("cached", "uncached"))
@pytest.mark.parametrize("page", (1, 16))
def test_what_cannot_begin_is_refused_and_nothing_else(
    page: int, cached: bool, chunk: int | None, sliding: bool
) -> None:
    made = scheduler(page, cached, chunk, sliding)
    # A cached prefix may leave a prompt room in the sliding layers' pool: SGLang's matter.
    is_open = sliding and cached and chunk is None
    for case in itertools.product(range(1, LIMIT), (0, 1, 8, 1000), (False, True)):
        ours, sglangs = Request(*case), Request(*case)
        for request in (ours, sglangs):
            Scheduler.init_req_max_new_tokens(made, request)  # type: ignore[arg-type]
        limit_request(made, ours)
        if ours.to_finish is not None:
            # Nor could one that asks for nothing.
            sglangs.sampling_params.max_new_tokens = 0
            assert not begins(made, sglangs), case
            continue
        assert begins(made, ours) or is_open, case
        # Retracted, it begins again with its output.
        answer = 0 if sliding and chunk is None else ours.sampling_params.max_new_tokens
        for output in {1, answer // 2, answer - 1} & set(range(1, answer)):
            ours.output_ids = array("q", range(output))
            assert begins(made, ours), (case, output)


def test_requests_wait_for_ever_without_the_row() -> None:
    """The first of a queue, on an idle server: a prompt, and an answer that fills the pool."""
    for page, cached, tokens in ((16, True, POOL - 16), (16, True, LIMIT - 1), (1, False, 8)):
        made, request = scheduler(page, cached, None), Request(tokens, 1000, ignore_eos=True)
        Scheduler.init_req_max_new_tokens(made, request)  # type: ignore[arg-type]
        assert not begins(made, request)
        limit_request(made, request)
        if cached:
            assert f"({tokens} tokens) exceeds the maximum of 111 tokens" in request.to_finish
        else:
            assert begins(made, request)
            assert request.sampling_params.max_new_tokens == POOL - tokens - 3


def unfinished(add: Any, *answers_reserved: bool) -> list[int]:
    """The requests of one prefill whose prompts were cut, by their place; it has chunks of 31
    tokens in pages of 4."""
    adder = adder_of(scheduler(4, cached=False, chunk=31))
    requests = [Request(40, 4, ignore_eos) for ignore_eos in answers_reserved]
    for request in requests:
        if add(adder, request, False, None) != AddReqResult.CONTINUE:
            break
    run: list[Any] = adder.can_run_list
    cut = [request for request in run if request.extend_len < 40]
    assert adder.new_chunked_req is cut[-1]
    return [requests.index(request) for request in cut]


ADD = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"


def test_a_prompt_is_cut_short_without_the_row() -> None:
    assert unfinished(original(ADD), False, True) == [0, 1]


def test_one_prompt_is_cut_in_a_prefill() -> None:
    add = partial(add_request, original(ADD))
    assert unfinished(add, False, True) == [0]
    assert unfinished(add, False, False) == [0]
    assert unfinished(add, True, True) == [0]
    # Nor beside one that an earlier prefill has cut.
    made, request = scheduler(4, cached=False, chunk=31), Request(40, 4, ignore_eos=True)
    adder = adder_of(made)
    assert add(adder, request, True, None) == AddReqResult.OTHER and not adder.can_run_list
    short = Request(20, 4, ignore_eos=True)
    assert add(adder, short, True, None) == AddReqResult.CONTINUE


def test_a_prefill_server_asks_for_a_token() -> None:
    """It sets `max_new_tokens` once a request is queued."""
    for page, cached, sliding in itertools.product((1, 16), (True, False), (True, False)):
        mode = DisaggregationMode.PREFILL
        made = scheduler(page, cached, None, sliding, disaggregation_mode=mode)
        for tokens, ignores in itertools.product(range(1, LIMIT), (True, False)):
            request = Request(tokens, 1000, ignores)
            Scheduler.init_req_max_new_tokens(made, request)  # type: ignore[arg-type]
            limit_request(made, request)
            request.sampling_params.max_new_tokens = 1
            case = page, cached, sliding, tokens, ignores
            refused = request.to_finish is not None
            assert begins(made, request) != refused or (sliding and cached and not refused), case


class Arrivals(DecodePreallocQueue):
    """A decode server's queue of arrivals, empty."""

    num_reserved_decode_tokens, max_total_num_tokens = 40, POOL

    def __init__(self, page: int) -> None:
        self.scheduler = scheduler(page, True, None)
        self.token_to_kv_pool_allocator = self.scheduler.token_to_kv_pool_allocator
        self.tree_cache = self.scheduler.tree_cache
        self.answered: list[Any] = []
        self.scheduler.output_streamer = SimpleNamespace(
            stream_output=lambda requests, _logprobs: self.answered.extend(requests)
        )

    def _uses_swa_tail_prealloc(self) -> bool:
        return False

    def begins(self, request: Any) -> bool:
        tokens = self._required_alloc_tokens(fill_len=len(request.origin_input_ids), prefix_len=0)
        needed = self._required_admission_tokens(request, tokens, 0, 0)
        return self._prealloc_reservation_fits(
            needed, 0, full_allocatable_tokens=POOL, swa_allocatable_tokens=None
        )


@pytest.mark.parametrize("page", (1, 16))
def test_arrivals_wait_for_ever_without_the_row(page: int) -> None:
    queue, theirs = Arrivals(page), 0
    for tokens, answer in itertools.product(range(1, LIMIT), (0, 1, 1000)):
        request: Any = Request(tokens, answer, ignore_eos=False)
        Scheduler.init_req_max_new_tokens(queue.scheduler, request)  # type: ignore[arg-type]
        assert not original(EXCEEDS)(queue, request)
        begins = queue.begins(request)
        theirs += not begins
        assert check_arrival(original(EXCEEDS), queue, request) != begins, (tokens, answer)
        assert begins or request.finished_reason.status_code == 400
    assert len(queue.answered) == theirs > 90
    # A retracted request has been answered in part.
    request.output_ids = array("q", [1])
    assert not check_arrival(original(EXCEEDS), queue, request)
    # SGLang refuses one itself.
    assert check_arrival(lambda *_: True, queue, request)
