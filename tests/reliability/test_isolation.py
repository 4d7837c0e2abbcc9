"""No request sees anything of another: its answers and drafts are those that it has by itself,
however slots are recycled, and draft K/V of a freed slot is never read."""

from __future__ import annotations

import copy

import pytest
import torch

from sglang_dflash.serving.step.batch import DFlashVerifyInput
from tests.reliability.tenants import Request, Served, prepared
from tests.serving.in_process import decode_of, filled, prefill_of, worker_of

# Prompts of 3 to 11 tokens and up to 3 steps fill the 24 columns of a row at most.
FIRST = [Request(number, 3 + number % 9, 1 + number % 3) for number in range(1, 15)]
SECOND = [Request(number, 11 - number % 8, 1 + number % 2) for number in range(101, 119)]
WINDOWS = [None, 7]


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepared)


def by_itself(request: Request, window: int | None, looks_up: bool = False) -> Request:
    """The same request, served on a worker of its own."""
    copied = Request(request.number, request.prompt, request.steps)
    Served(window, looks_up).run([[copied]])
    return copied


@pytest.mark.parametrize(
    ("window", "looks_up"), [(None, False), (7, False), (7, True)], ids=["all", "window", "lookup"]
)
def test_two_tenants_are_served_as_by_themselves(window: int | None, looks_up: bool) -> None:
    served, queues = Served(window, looks_up), [copy.deepcopy(FIRST), copy.deepcopy(SECOND)]
    served.run(queues)
    assert served.nonfinite() == 0
    assert (served.worker.drafter.counters.read().lookup_accepted > 10) == looks_up
    for request in (*queues[0], *queues[1]):
        expected = by_itself(request, window, looks_up)
        assert request.outputs == expected.outputs
        assert request.drafts == expected.drafts
    # Otherwise nothing would depend on the drafts.
    lengths = [len(request.outputs) - 1 for queue in queues for request in queue]
    steps = [request.steps for queue in queues for request in queue]
    assert sum(lengths) > 1.5 * sum(steps)


@pytest.mark.parametrize("window", WINDOWS)
def test_one_tenants_nan_does_not_reach_the_other(window: int | None) -> None:
    served, queues = Served(window), [copy.deepcopy(FIRST), copy.deepcopy(SECOND)]
    served.target.broken = {request.number for request in FIRST}
    served.run(queues)
    assert served.nonfinite() > 0
    for request in queues[1]:
        expected = by_itself(request, window)
        assert (request.outputs, request.drafts) == (expected.outputs, expected.drafts)


def test_a_long_prompt_leaves_nothing_of_its_slots_last_owner() -> None:
    """Tokens that no draft sees are not written: their slots must be marked dead. A shorter request
    that finds them in the prefix cache would read another one's K/V."""
    worker = filled(worker_of(7), [12])
    slots = worker.req_to_token[1].long()
    assert worker.drafter.groups[0].cache.find(slots[5:12])[1].all()
    worker.forward_batch_generation(prefill_of([0], [20]))
    live = worker.drafter.groups[0].cache.find(slots[:20])[1]
    assert live.tolist() == [False] * 13 + [True] * 7


@pytest.mark.parametrize("window", WINDOWS)
def test_a_step_keeps_the_committed_tokens_and_no_other(window: int | None) -> None:
    worker = Served(window)
    worker.start(1, Request(1, 9, 9))
    cache, slots = worker.worker.drafter.groups[0].cache, worker.table[1].long()
    lengths = set()
    for _ in range(3):
        before, length = cache.kv.clone(), worker.running[1].length
        worker.step()
        block = slice(length, length + worker.worker.verify_block)
        committed = worker.running[1].length - length
        lengths.add(committed)
        expected = [i < committed for i in range(worker.worker.verify_block)]
        if window is None:
            changed = (cache.kv != before).flatten(1).any(1)
            assert changed[slots[block]].tolist() == expected
        else:
            assert cache.find(slots[block])[1].tolist() == expected
    assert len(lengths) > 1


def test_a_failed_verify_publishes_and_commits_nothing() -> None:
    """The exception goes to the scheduler; the draft KV cache holds no token of the step."""
    worker, published = filled(worker_of(7), [9, 14]), []

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    worker.target_worker.forward_batch_generation = fails
    before, batch = worker.drafter.groups[0].cache.tags.entry_of.clone(), decode_of([9, 14])
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.forward_batch_generation(batch, published.append)
    after = worker.drafter.groups[0].cache.tags.entry_of
    assert published == [] and torch.equal(after, before)
    assert batch.seq_lens_cpu.tolist() == [9, 14] and batch.seq_lens_sum == 23
