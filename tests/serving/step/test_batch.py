"""Changes of SGLang's batch by our worker: a forward's preparation leaves it as it was, even if it
fails; KV slots are reserved anew only if a block might not fit in what is reserved; and the pool
is used up to its last slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dflash.serving.step import batch as ours
from tests.patches.originals import original
from tests.serving.batches import batch_of, request_of

BLOCK = 8


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_a_verify_forward_leaves_the_lengths_as_they_were(
    on_host: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparation counts the block in; without host lengths it has what is reserved."""
    reserved = SimpleNamespace(nxt_kv_lens_cpu=torch.tensor([13, 17]), nxt_kv_lens_sum=30)
    batch = batch_of(
        seq_lens_cpu=torch.tensor([5, 9]) if on_host else None,
        seq_lens_sum=14 if on_host else None,
        spec_info=reserved,
    )
    before, found = (batch.seq_lens_cpu, batch.seq_lens_sum), []

    def prepare_for_verify(_self: Any, batch: Any, _worker: Any) -> tuple[str, None]:
        found.append((batch.seq_lens_cpu.tolist(), batch.seq_lens_sum))
        if fails:
            raise RuntimeError("no memory")
        return "forward", None

    monkeypatch.setattr(ours.DFlashVerifyInput, "prepare_for_verify", prepare_for_verify)
    block = torch.zeros(2, 4, dtype=torch.int64)
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            ours.verify_batch(batch, None, block, block, block)
    else:
        assert ours.verify_batch(batch, None, block, block, block) == "forward"
    assert found == [([9, 13], 22) if on_host else ([13, 17], 30)]
    assert batch.seq_lens_cpu is before[0] and batch.seq_lens_sum == before[1]


def test_a_forward_may_change_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's class with images adds one in place. The step's own say where draft K/V belongs,
    and which noise a token is drawn with."""

    def add_one(verify_input: Any, *_: Any) -> tuple[list[int], None]:
        verify_input.positions += 1
        return verify_input.positions.tolist(), None

    monkeypatch.setattr(ours.DFlashVerifyInput, "prepare_for_verify", add_one)
    batch = batch_of(seq_lens_cpu=torch.tensor([5, 9]), seq_lens_sum=14)
    block, positions = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[5, 6], [9, 10]])
    assert ours.verify_batch(batch, None, block, positions, block) == [6, 7, 10, 11]
    assert positions.tolist() == [[5, 6], [9, 10]]


class Pool:
    """Stands in for SGLang's pool: an allocator of `free` slots, in pages."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        free: int = 10_000,
        page: int = 1,
        block: int = BLOCK,
    ) -> None:
        self.free, self.page_size, self.count, self.asked = free, page, 0, 0
        spec = SimpleNamespace(speculative_num_draft_tokens=block)
        monkeypatch.setattr(ours, "get_spec", lambda: spec)
        monkeypatch.setattr(ours, "alloc_for_spec_decode", self.reserve)

    def available_size(self) -> int:
        return self.free

    def check_decode_capacity(self, *, num_tokens: int, tree_cache: Any) -> bool:
        self.asked = num_tokens
        return num_tokens <= self.free

    def new_slots(self, request: Any, length: int) -> int:
        """Slots of the pages that `request` lacks for so many tokens."""
        held = pages_of(request.kv.kv_allocated_len, self.page_size)
        return max(0, pages_of(length, self.page_size) - held)

    def reserve(
        self, _tree: Any, _table: Any, *, reqs: Any, num_needed_tokens: int, **lengths: Any
    ) -> None:
        self.count += 1
        now, then = (lengths[f"{name}_kv_lens_cpu"].tolist() for name in ("cur", "nxt"))
        assert now == [request.kv.kv_allocated_len for request in reqs]
        assert sum(then) - sum(now) == num_needed_tokens
        taken = sum(map(self.new_slots, reqs, then))
        # Cached prefixes make room for what is asked for.
        assert taken == self.asked or taken <= self.free < self.asked
        self.free -= taken
        for request, length in zip(reqs, then, strict=True):
            assert length % self.page_size == 0
            request.kv.kv_allocated_len = length

    def prefill(self, request: Any) -> None:
        # As SGLang does: its last page is allocated in part.
        request.kv.kv_committed_len = request.kv.kv_allocated_len = request.length
        self.free -= pages_of(request.length, self.page_size)
        assert self.free >= 0

    def release(self, request: Any) -> int:
        self.free += pages_of(request.kv.kv_allocated_len, self.page_size)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = 0
        return 1


def pages_of(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def request_with(committed: int, allocated: int, new: int = 1000) -> Any:
    """Make a request with `committed` tokens in `allocated` slots; its last new one needs none."""
    made: Any = request_of(prompt=committed, max_new_tokens=new, decode_batch_idx=3)
    made.kv.kv_committed_len, made.kv.kv_allocated_len = committed, allocated
    # What the target has computed, whether or not the host knows.
    made.length, made.longest = committed, committed + new - 1
    return made


def running_batch(pool: Pool, requests: list[Any]) -> Any:
    tree_cache = SimpleNamespace(supports_swa=lambda: False)
    batch = batch_of(token_to_kv_pool_allocator=pool, tree_cache=tree_cache)
    # The list itself: requests join and leave it.
    batch.reqs = requests
    return batch


def input_after(width: int, requests: int = 2) -> ours.DraftInput:
    some = torch.ones(requests, dtype=torch.int64)
    return ours.draft_input(some, some, width)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_step_writes_reserved_slots_only(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random widths; under overlap the host knows lengths one step later."""
    pool, rng = Pool(monkeypatch), np.random.default_rng(0)
    length = [20, 33]
    batch, step = running_batch(pool, [request_with(n, n) for n in length]), input_after(0)
    for _ in range(500):
        step.prepare_for_decode(batch)
        assert step.ends is None
        width = int(rng.choice([1, 1, 1, 4, BLOCK]))
        known = list(length)
        for i, request in enumerate(batch.reqs):
            assert length[i] + width < request.kv.kv_allocated_len
            length[i] += int(rng.integers(1, width + 1))
            request.kv.kv_committed_len = known[i] if overlap else length[i]
        step = input_after(width if overlap else 0)
    assert 50 < pool.count < 400


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("requests", [1, 2])
def test_answers_that_just_fit_take_the_whole_pool(
    requests: int, page: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool with a slot for every token but the answers' last, as plain decoding needs, no step
    commits a token without a slot, and the next one always has one; whatever steps commit, and
    however late the host knows. Only two requests may take each other's: SGLang then retracts one,
    and resumes it once there is room."""
    rng, retracted = np.random.default_rng(10 * requests + page), 0
    for _ in range(60):
        # An answer of one token ends with its prefill.
        jobs = [(int(rng.integers(1, 40)), int(rng.integers(2, 60))) for _ in range(requests)]
        sizes = [pages_of(n + new - 1, page) for n, new in jobs]
        # SGLang admits a second request before there is room for the whole of its answer, too.
        tight = int(rng.integers(0, 1 + min(sizes) // page)) * page if requests == 2 else 0
        pool = Pool(monkeypatch, sum(sizes) - tight, page)
        running: list[Any] = []
        waiting = [request_with(n, 0, new) for n, new in jobs]
        step = input_after(0, 0)
        for _ in range(500):
            if not running and not waiting:
                break
            # SGLang admits what fits beside the rest of the answers that run.
            rest = sum(pool.new_slots(r, r.longest) for r in running)
            rest = max(rest - tight, 0)
            if (
                waiting
                and pool.free - rest >= pages_of(waiting[0].longest, page) - tight
                and (pool.free >= pages_of(waiting[0].length + 1, page))
            ):
                running.append(waiting.pop(0))
                pool.prefill(running[-1])
            batch = running_batch(pool, running)
            batch.spec_info = step
            if ours.slots_for_next_step(batch, running, page) > pool.free:
                assert len(running) == 2
                running.sort(key=lambda request: -request.length)
                waiting.append(running.pop())
                retracted += pool.release(waiting[-1])
            step.prepare_for_decode(batch)
            for request in running:
                end = request.kv.kv_allocated_len
                # Of the bonus token, which the step writes whatever the host knows.
                assert request.length < end
                most = BLOCK if step.ends is None else max(1, end - 1 - request.length)
                request.kv.kv_committed_len = request.length
                # Whole blocks in a row, most of the time.
                least = min(BLOCK, most) if rng.random() < 0.7 else 1
                request.length += int(rng.integers(least, min(BLOCK, most) + 1))
                request.length = min(request.length, request.longest)
                assert request.length <= end
                if not overlap:
                    request.kv.kv_committed_len = request.length
            for request in [r for r in running if r.length == r.longest]:
                running.remove(request)
                pool.release(request)
            step = input_after(BLOCK if overlap else 0, len(running))
        assert not running and not waiting
    assert retracted <= 60 * (requests - 1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("block", [2, 3, 8, 16])
@pytest.mark.parametrize("page", [1, 2, 16, 64])
def test_a_step_is_refused_only_if_it_does_not_fit(
    page: int, block: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of any length join, are retracted and end, in a pool that is too small for all. A
    step that SGLang lets run gets its slots; under overlap an answer's end is known a step late."""
    rng = np.random.default_rng([page, block, overlap])
    pool = Pool(monkeypatch, pages_of(max(240, 5 * page), page), page, block)
    size, running, step = pool.free, [], input_after(0, 0)
    refused = short = 0
    for _ in range(600):
        joins = request_with(int(rng.integers(1, 60)), 0, int(rng.integers(2, 90)))
        if len(running) < 6 and pages_of(joins.length, page) <= pool.free and rng.random() < 0.3:
            pool.prefill(joins)
            running.append(joins)
            # Meanwhile the host has processed the last step.
            for request in running:
                request.kv.kv_committed_len = request.length
            step.in_flight = 0
        batch = running_batch(pool, running)
        batch.spec_info = step
        unknown = int(step.in_flight > 0)
        while running:
            needed = sum(pool.new_slots(r, r.kv.kv_committed_len + 1 + unknown) for r in running)
            if ours.slots_for_next_step(batch, running, page) <= pool.free:
                assert needed <= pool.free
                break
            assert needed > pool.free
            refused += 1
            pool.release(running.pop(int(rng.integers(len(running)))))
        committed = [request.kv.kv_committed_len for request in running]
        # The largest equal share, of what answers can reach.
        ends = [[min(n + i, r.longest) for n, r in zip(committed, running, strict=True)]
                for i in range(1, 2 * block + 1)]  # fmt: skip
        fit = [e for e in ends if sum(map(pool.new_slots, running, e)) <= pool.free]
        wanted = sum(pool.new_slots(r, r.kv.kv_committed_len + 2 * block + 1) for r in running)
        is_short = wanted > pool.free
        step.prepare_for_decode(batch)
        if step.ends is not None:
            short += 1
            assert is_short and (step.ends >= torch.tensor(fit[-1])).all()
        width = int(rng.choice([1, block - 1, block]))
        for request in running:
            end, kv = request.kv.kv_allocated_len, request.kv
            # The bonus token has a slot, unless the answer has ended.
            assert request.length < end or request.length >= request.longest
            if step.ends is None:
                assert request.length + width < end
                most = width
            else:
                most = max(1, min(width, end - 1 - request.length))
            kv.kv_committed_len = request.length
            request.length += int(rng.choice([1, most, rng.integers(1, most + 1)]))
            if not overlap:
                kv.kv_committed_len = request.length
        for request in [r for r in running if r.kv.kv_committed_len >= r.longest]:
            running.remove(request)
            pool.release(request)
        step = input_after(width if overlap else 0, len(running))
    assert refused > 5 and short > 5
    assert pool.free + sum(pages_of(r.kv.kv_allocated_len, page) for r in running) == size


def test_sglang_asks_for_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does for a step of a request whose answer needs no more than one slot. Both ask for whole
    pages that the requests do not have."""
    name = "_new_tokens_required_next_decode_spec_v2"
    theirs = original(f"sglang.srt.managers.schedule_batch.ScheduleBatch.{name}")
    batch = running_batch(Pool(monkeypatch), [request_with(n, n) for n in (16, 17, 20, 31)])
    for in_flight, reserve in ((0, 1), (BLOCK, 2)):
        batch.spec_info = input_after(in_flight, 4)
        for page, slots in ((1, 4 * reserve), (16, 16 * reserve)):
            assert ours.slots_for_next_step(batch, batch.reqs, page) == slots
            for tokens in (reserve, 2 * BLOCK):
                names = theirs.__globals__
                monkeypatch.setitem(names, "get_alloc_reserve_per_decode", lambda n=tokens: n)
                asked = theirs(batch, batch.reqs, page)
                assert asked == slots if tokens == reserve else asked > slots


def test_steps_without_drafts_reserve_once_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch)
    batch = running_batch(pool, [request_with(20, 20)])
    for _ in range(8 * BLOCK):
        input_after(1, 1).prepare_for_decode(batch)
        batch.reqs[0].kv.kv_committed_len += 1
    assert pool.count == pytest.approx(8, abs=1.5)


def test_what_is_reserved_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that SGLang's method leaves behind: without reserving, and if a block ends beyond what is
    left."""
    for free, reserved, ends in ((0, [36, 46], None), (3, [24, 33], [25, 35])):
        pool, step = Pool(monkeypatch, free), input_after(1)
        batch = running_batch(pool, [request_with(20, reserved[0]), request_with(30, reserved[1])])
        step.prepare_for_decode(batch)
        assert pool.count == (ends is not None)
        assert batch.seq_lens_cpu.tolist() == [20, 30] and batch.seq_lens_cpu.dtype == torch.int64
        assert batch.seq_lens_sum == 50
        longest = [30, 40] if ends else [36, 46]
        assert step.nxt_kv_lens_cpu is not None and step.nxt_kv_lens_cpu.tolist() == longest
        assert step.nxt_kv_lens_cpu.dtype == torch.int32 and step.nxt_kv_lens_sum == sum(longest)
        assert [request.decode_batch_idx for request in batch.reqs] == [4, 4]
        assert (None if step.ends is None else step.ends.tolist()) == ends


def test_a_merged_batch_expects_the_wider_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, step = Pool(monkeypatch), input_after(1, 1)
    step.merge_batch(input_after(BLOCK, 1))
    step.prepare_for_decode(running_batch(pool, [request_with(20, 35), request_with(30, 45)]))
    assert pool.count == 1
