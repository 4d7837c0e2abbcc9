"""Copies from and to the host memory of a hierarchical cache hold up a step for a bounded time, in
bounded memory, and a late copy is of the token that it was planned for."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.kv.tagged import TaggedKVCache
from sglang_dflash.serving.kv_transfer import host_tier, staging
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.kv_transfer.staging import Staging
from tests.alive import Alive
from tests.conftest import write_kv
from tests.serving.fake_cuda import FakeCuda
from tests.serving.in_process import SLOTS as WORKERS_SLOTS
from tests.serving.in_process import decode_of, draft_kv, prefill_of, worker_of
from tests.serving.kv_transfer.test_host_tier import (
    CACHES,
    HOST,
    SHAPE,
    SLOTS,
    Arrival,
    arrivals,
    at,
    group,
    nothing,
    of,
    read,
    write,
)

NO_SLOTS = torch.empty(0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _two_tokens_per_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "PIECE", 2)
    monkeypatch.setattr(host_tier, "LEAST", 1)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    return arrivals(monkeypatch)


def test_a_step_copies_as_many_tokens_as_it_computes_and_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker's steps copy out and back; at the end everything is there."""
    worker = worker_of(None, hierarchical=True)
    cache = worker.drafter.groups[0].cache
    there = torch.arange(WORKERS_SLOTS - 24, WORKERS_SLOTS - 4)
    write_kv(cache, there, torch.randn(20, *cache.kv.shape[1:]))
    before, moved = draft_kv(worker, there), list[int]()

    def counted(name: str, which: int) -> None:
        method = getattr(Staging, name)

        def count(*args: Any) -> Any:
            moved[-1] += len(args[which])
            return method(*args)

        monkeypatch.setattr(Staging, name, count)

    counted("send", 1)
    counted("fetch", 2)

    def steps(*batches: Any) -> list[int]:
        moved.clear()
        for batch in batches:
            moved.append(0)
            worker.forward_batch_generation(batch)
        return moved

    block = worker.verify_block
    worker.host_tier.plan_backup(there, torch.arange(20), HOST)
    out = steps(prefill_of([0], [3]), *(decode_of([3]) for _ in range(4)))
    assert out[0] in (5, 6) and all(some <= block + 3 for some in out) and sum(out) == 20
    write_kv(cache, there, torch.zeros(20, *cache.kv.shape[1:]))
    worker.host_tier._staging.wait()
    worker.host_tier.plan_load(torch.arange(20), there)
    back = steps(*(decode_of([3]) for _ in range(5)))
    # With the next piece, which is gathered while the forward runs.
    assert back[0] <= block + 5 and sum(back) == 20 and back[1]
    assert torch.equal(draft_kv(worker, there), before)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_memory_on_the_way_does_not_grow_with_the_prefix(
    tokens: int, events: list[Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing arrives before the host waits for it."""
    monkeypatch.setattr(staging, "RING", 1 << 10)
    monkeypatch.setattr(host_tier, "PIECE", 16)
    shape = (4, 2, 1, 1)
    cache = TaggedKVCache(2 * tokens + 1, shape, torch.float32, "cpu")
    write_kv(cache, torch.arange(tokens), torch.randn(tokens, *shape))
    tier, slots = HostTier([group(cache, Reach())], carried=1), torch.arange(tokens)
    # The host's own pool is no memory on the way.
    tier.plan_backup(slots[:1], slots[:1], tokens)
    tier.run_copies(nothing)
    with Alive() as alive:
        tier.plan_backup(slots, slots, tokens)
        tier.run_copies(nothing)
        # The rows of a piece, and some numbers of each.
        assert alive.most < 16 * (32 + 64)
        assert len(events) > tokens // 16 and not events[-1].reached
    tier.plan_load(slots, slots + tokens)
    tier.run_copies(nothing)
    assert read(cache, slots + tokens) == read(cache, slots)


@pytest.mark.parametrize("kind", CACHES)
def test_a_slot_that_is_used_again_before_its_copy_is_not_copied(kind: str) -> None:
    tier, cache = of(CACHES[kind](torch.float32))
    write(cache, torch.arange(1, 9), [float(slot) for slot in range(1, 9)])
    tier.plan_backup(torch.arange(1, 9), torch.arange(30, 38), HOST)
    # A piece, and one more for the forward's token.
    tier.run_copies(nothing, at(5, 6))
    write(cache, at(5, 6), [-1.0, -1.0])
    tier.run_copies(nothing)
    tier.plan_load(torch.arange(30, 38), torch.arange(11, 19))
    tier.run_copies(nothing)
    assert read(cache, torch.arange(11, 19)) == [1.0, 2.0, 3.0, 4.0, None, None, 7.0, 8.0]


@pytest.mark.parametrize("kind", CACHES)
def test_a_slot_that_is_used_again_before_it_is_loaded_is_left_alone(kind: str) -> None:
    """Its request was aborted. What is not loaded yet is dead, not what was there."""
    tier, cache = of(CACHES[kind](torch.float32))
    write(cache, at(1, 2, 3, 4, 5, 6), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    tier.plan_backup(at(1, 2, 3, 4, 5, 6), torch.arange(30, 36), HOST)
    tier.run_copies(nothing)
    tier._staging.wait()
    write(cache, torch.arange(11, 17), [-1.0] * 6)
    tier.plan_load(torch.arange(30, 36), torch.arange(11, 17))
    # Two pieces, the last tokens first.
    tier.run_copies(nothing, at(12, 13))
    assert read(cache, torch.arange(11, 17)) == [None, None, 3.0, 4.0, 5.0, 6.0]
    write(cache, at(12, 13), [-2.0, -2.0])
    tier.run_copies(nothing)
    assert read(cache, torch.arange(11, 17)) == [1.0, -2.0, -2.0, 4.0, 5.0, 6.0]
    # That of slot 13 had come back before.
    assert (tier.loaded, tier.loaded_draft) == (6, 5)


@pytest.mark.parametrize("kind", CACHES)
def test_a_load_that_comes_too_late_is_not_counted(kind: str) -> None:
    tier, cache = of(CACHES[kind](torch.float32))
    write(cache, at(1, 2, 3), [1.0, 2.0, 3.0])
    tier.plan_backup(at(1, 2, 3), at(30, 31, 32), HOST)
    tier.run_copies(nothing)
    tier.plan_backup(torch.arange(4, 10), torch.arange(33, 39), HOST)
    tier.plan_load(at(30, 31, 32), at(11, 12, 13))
    # All that this step copies is of the backup.
    tier.run_copies(nothing, at(11, 12, 13))
    tier.run_copies(nothing)
    assert read(cache, at(11, 12, 13)) == [None] * 3
    assert (tier.loaded, tier.loaded_draft) == (3, 0)


def test_slots_of_copies_that_wait_are_dead_at_once() -> None:
    """Slots of copies that come after what a step copies are dead, too."""
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, torch.arange(1, 9), [1.0] * 8)
    tier.plan_backup(torch.arange(1, 9), torch.arange(30, 38), HOST)
    write(cache, at(11, 12), [-1.0, -1.0])
    tier.plan_load(at(30, 31), at(11, 12))
    tier.run_copies(nothing, NO_SLOTS)
    assert read(cache, at(11, 12)) == [None, None]
    tier.run_copies(nothing)
    assert read(cache, at(11, 12)) == [1.0, 1.0]


def test_host_slots_that_are_evicted_while_their_rows_land(events: list[Arrival]) -> None:
    """They have the next token's draft K/V, or none."""
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, at(1, 2, 3, 4), [1.0, 2.0, 3.0, 4.0])
    tier.plan_backup(at(1, 2, 3), at(30, 31, 32), HOST)
    tier.run_copies(nothing)
    tier.plan_backup(at(4, 9), at(30, 31), HOST)
    tier.plan_loss(at(32))
    tier.run_copies(nothing)
    assert not any(event.reached for event in events)
    tier.plan_load(at(30, 31, 32), at(11, 12, 13))
    tier.run_copies(nothing)
    assert read(cache, at(11, 12, 13)) == [4.0, None, None]


def test_after_a_flush_nothing_lands(events: list[Arrival]) -> None:
    """Neither what was on its way, nor what had not begun."""
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, torch.arange(1, 9), [1.0] * 8)
    tier.plan_backup(torch.arange(1, 9), torch.arange(30, 38), HOST)
    tier.run_copies(nothing, NO_SLOTS)
    assert len(events) == 1
    tier.clear()
    tier.plan_load(torch.arange(30, 38), torch.arange(11, 19))
    tier.run_copies(nothing)
    assert read(cache, torch.arange(11, 19)) == [None] * 8 and len(events) == 1


def test_a_server_that_sends_draft_kv_leaves_nothing_for_later() -> None:
    cache = TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu")
    tier = HostTier([group(cache, Reach())], carried=1, sends=True)
    write(cache, torch.arange(1, 9), [1.0] * 8)
    tier.plan_backup(torch.arange(1, 9), torch.arange(30, 38), HOST)
    tier.plan_load(torch.arange(30, 38), torch.arange(11, 19))
    tier.run_copies(nothing, NO_SLOTS)
    assert read(cache, torch.arange(11, 19)) == [1.0] * 8


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(10))
def test_no_slot_has_another_tokens_draft_kv(
    kind: str, seed: int, events: list[Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of the device and of the host change their tokens at random, while a step copies less
    than is planned, through a ring of a few pieces. A token's number is its K/V."""
    monkeypatch.setattr(staging, "RING", 200)
    dice, (tier, cache) = random.Random(seed), of(CACHES[kind](torch.float32))
    tokens, hosts, newest, alive = dict[int, float](), dict[int, float](), 0.0, 0
    for _ in range(150):
        for _ in range(dice.randrange(3)):
            what, size = dice.choice(("out", "in", "lose")), dice.randrange(1, 7)
            if what == "lose":
                some = dice.sample(range(HOST), size)
                tier.plan_loss(at(*some))
                hosts |= dict.fromkeys(some, 0.0)
            elif what == "out" and len(tokens) >= size:
                some, there = dice.sample(sorted(tokens), size), dice.sample(range(HOST), size)
                tier.plan_backup(at(*some), at(*there), HOST)
                hosts |= {h: tokens[slot] for h, slot in zip(there, some, strict=True)}
            elif what == "in" and len(hosts) >= size:
                some, there = dice.sample(sorted(hosts), size), dice.sample(range(1, SLOTS), size)
                tier.plan_load(at(*some), at(*there))
                tokens |= {slot: hosts[h] for h, slot in zip(some, there, strict=True)}
        written = dice.sample(range(1, SLOTS), dice.randrange(1, 4))
        tier.run_copies(nothing, at(*written))
        numbers = [newest := newest + 1 for _ in written]
        write(cache, at(*written), numbers)
        tokens |= dict(zip(written, numbers, strict=True))
        for event in events:
            event.reached |= dice.random() < 0.3
        for slot, value in zip(tokens, read(cache, at(*tokens)), strict=True):
            assert value in (None, tokens[slot])
            alive += value is not None
    assert alive > 500


def test_the_next_piece_is_gathered_while_the_forward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, fetch, to_device = list[str](), Staging.fetch, Staging.to_device
    monkeypatch.setattr(Staging, "fetch", lambda *a: (calls.append("fetch"), fetch(*a))[1])
    monkeypatch.setattr(
        Staging, "to_device", lambda *a: (calls.append("to_device"), to_device(*a))[1]
    )
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, torch.arange(1, 7), [1.0] * 6)
    tier.plan_backup(torch.arange(1, 7), torch.arange(30, 36), HOST)
    tier.run_copies(nothing)
    tier._staging.wait()
    tier.plan_load(torch.arange(30, 36), torch.arange(11, 17))
    for expected in (["fetch", "fetch", "to_device"], ["fetch", "to_device"], ["to_device"], []):
        tier.run_copies(nothing, NO_SLOTS)
        assert calls == expected
        calls.clear()


def test_the_host_waits_for_no_device(
    events: list[Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows go out, and while they come in once they have arrived; on tensors of a GPU that
    is not there, and page-locked memory only."""
    gpu, take = FakeCuda(), Staging._take

    def taken(*args: Any) -> Any:
        buffer = take(*args)
        gpu.pinned |= {buffer.rows.data_ptr(), buffer.numbers.data_ptr()}
        return buffer

    monkeypatch.setattr(Staging, "_take", taken)
    for module in (staging, host_tier):
        monkeypatch.setattr(
            module, "page_locked", lambda size, _: gpu.pin(torch.zeros(size).byte())
        )
    monkeypatch.setattr(host_tier, "_used_here", lambda _: None)
    with gpu:
        cache = TaggedKVCache(SLOTS, SHAPE, torch.float32, "cuda")
        tier = HostTier([group(cache, Reach())], carried=1)
        slots = torch.arange(8, device="cuda")
        gpu.crossings.clear()
        tier.plan_backup(slots, torch.arange(30, 38), HOST)
        for _ in range(4):
            tier.run_copies(nothing, slots[:0])
        out = len(gpu.crossings)
        assert out == 8 and not any(event.reached for event in events)
        tier._staging.wait()
        tier._host_kv[0].live[30:38] = True
        tier.plan_load(torch.arange(30, 38), slots)
        for _ in range(4):
            tier.run_copies(nothing, slots[:0])
        # With the number of each piece's tokens that came.
        assert len(gpu.crossings) == 2 * out + 4
        assert not any(crossing.waits for crossing in gpu.crossings)


def test_what_the_thread_raises_ends_a_step() -> None:
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, at(1), [1.0])
    # A host slot that the pool does not have.
    tier.plan_backup(at(1), at(HOST), HOST)
    tier.run_copies(nothing)
    tier.plan_load(at(HOST - 1), at(2))
    with pytest.raises(IndexError):
        tier.run_copies(nothing)


def test_its_thread_ends_with_it() -> None:
    tier, cache = of(RingKVCache(12, SLOTS, SHAPE, torch.float32, "cpu"))
    before = {thread for thread in threading.enumerate() if "dflash-host-tier" in thread.name}
    write(cache, at(1), [1.0])
    tier.plan_backup(at(1), at(30), HOST)
    tier.run_copies(nothing)
    tier.run_copies(nothing)
    (mine,) = {t for t in threading.enumerate() if "dflash-host-tier" in t.name} - before
    del tier
    gc.collect()
    mine.join(10)
    assert not mine.is_alive()


def test_a_process_ends_while_rows_land() -> None:
    """The thread is at work, and some copies have not begun."""
    script = """
from types import SimpleNamespace
import torch
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv.tagged import TaggedKVCache
from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.serving.kv_transfer.host_tier import HostTier

cache = TaggedKVCache(4000, (4, 2, 64, 8), torch.float32, "cpu")
slots = torch.arange(4000)
cache.place(slots)
tier = HostTier([KVGroup(SimpleNamespace(reach=Reach()), cache, None)], carried=1)
for first in (0, 4000):
    tier.plan_backup(slots, slots + first, 8000)
tier.run_copies(lambda: None, slots[:1000])
tier._staging.poll()
print(bool(tier._begun), "ends")
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (0, "True ends\n"), ran.stderr
