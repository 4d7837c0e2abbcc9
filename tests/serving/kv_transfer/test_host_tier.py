"""Draft K/V beside a hierarchical cache: what comes back is what went, and what a slot held before
its token came back is never read."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.kv.tagged import TaggedKVCache
from sglang_dflash.serving.kv_transfer import host_tier, staging
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from tests.conftest import write_kv
from tests.patches.originals import original
from tests.serving.in_process import draft_kv, prefill_of, worker_of

SLOTS, HOST, SHAPE = 24, 40, (1, 2, 1, 1)
CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
CACHES: dict[str, Callable[..., DraftKVCache]] = {
    "per slot": lambda dtype: TaggedKVCache(SLOTS, SHAPE, dtype, "cpu"),
    "ring": lambda dtype: RingKVCache(12, SLOTS, SHAPE, dtype, "cpu"),
}


def of(cache: DraftKVCache, window: int | None = None) -> tuple[HostTier, DraftKVCache]:
    return HostTier([group(cache, Reach(window))], carried=1), cache


def group(cache: DraftKVCache, reach: Reach) -> KVGroup:
    layer_group: Any = SimpleNamespace(reach=reach)
    attention: Any = None
    return KVGroup(layer_group, cache, attention)


def at(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def write(cache: DraftKVCache, slots: Tensor, numbers: list[float]) -> None:
    kv = torch.tensor(numbers)[:, None, None, None, None].expand(-1, *SHAPE)
    write_kv(cache, slots, kv)


def read(cache: DraftKVCache, slots: Tensor) -> list[float | None]:
    entries, live = cache.find(slots)
    values = cache.kv[entries].float().flatten(1)[:, 0].tolist()
    return [value if lives else None for value, lives in zip(values, live.tolist(), strict=True)]


def nothing() -> None:
    pass


@pytest.mark.parametrize("piece", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_what_was_backed_up_comes_back(
    kind: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to slots that held another request's tokens; what never had draft K/V is dead."""
    monkeypatch.setattr(host_tier, "PIECE", piece)
    tier, cache = of(CACHES[kind](dtype))
    write(cache, at(1, 2, 3), [1.0, 2.0, 3.0])
    tier.plan_backup(at(1, 2, 9, 3), at(30, 31, 32, 33), HOST)
    tier.run_copies(nothing)
    write(cache, at(1, 2, 3, 5, 6, 7, 8), [-1.0] * 7)
    tier.plan_load(at(30, 31, 32, 33), at(5, 6, 7, 8))
    tier.run_copies(nothing)
    assert read(cache, at(5, 6, 7, 8)) == [1.0, 2.0, None, 3.0]
    assert (tier.loaded, tier.loaded_draft) == (4, 3)


@pytest.mark.parametrize("kind", CACHES)
def test_of_another_token_nothing_is_read(kind: str) -> None:
    """Host slots that get tokens from storage, or that no backup has filled; then flushed ones."""
    tier, cache = of(CACHES[kind](torch.float32))
    for filled in (False, True):
        write(cache, at(1, 2, 3, 4), [-1.0] * 4)
        if filled:
            tier.plan_backup(at(1, 2), at(30, 31), HOST)
            tier.plan_loss(at(31))
        tier.plan_load(at(30, 31), at(3, 4))
        tier.run_copies(nothing)
        assert read(cache, at(3, 4)) == [-1.0 if filled else None, None]
    tier.clear()
    tier.plan_load(at(30, 31), at(3, 4))
    tier.run_copies(nothing)
    assert read(cache, at(3, 4)) == [None, None]


def test_of_every_part_of_a_prefix_the_last_tokens_come_back() -> None:
    """Another request may go on from the first one."""
    tier, cache = of(RingKVCache(12, SLOTS, SHAPE, torch.float32, "cpu"), window=2)
    write(cache, at(1, 2, 3, 4, 5, 6), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    tier.plan_backup(at(1, 2, 3), at(30, 31, 32), HOST)
    tier.plan_backup(at(4, 5, 6), at(33, 34, 35), HOST)
    tier.plan_load(at(30, 31, 32, 33, 34, 35), at(11, 12, 13, 14, 15, 16))
    tier.run_copies(nothing)
    assert read(cache, at(11, 12, 13, 14, 15, 16)) == [None, 2.0, 3.0, None, 5.0, 6.0]


def test_sinks_come_back_if_not_everything_fits() -> None:
    cache = RingKVCache(12, SLOTS, SHAPE, torch.float32, "cpu")
    tier = HostTier([group(cache, Reach(2, 2))], carried=2)
    there = [range(1, 5), range(5, 9)]
    for first, part in zip((30, 34), there, strict=True):
        write(cache, at(*part), [float(slot) for slot in part])
        tier.plan_backup(at(*part), torch.arange(first, first + 4), HOST)
    tier.plan_load(torch.arange(30, 38), torch.arange(11, 19))
    tier.run_copies(nothing)
    assert read(cache, torch.arange(11, 19)) == [1.0, 2.0, None, None, 5.0, 6.0, 7.0, 8.0]
    # A ring of 12 entries, of which a request may take half.
    assert (tier.loaded, tier.loaded_draft) == (8, 6)


@pytest.mark.parametrize("carried", [1, 4, 12])
def test_with_an_entry_per_slot_all_that_is_visible_comes_back(carried: int) -> None:
    """However many requests may run: of a ring each would get a share."""
    cache = TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu")
    tier = HostTier([group(cache, Reach(4, 2))], carried=carried)
    write(cache, torch.arange(1, 11), [float(slot) for slot in range(1, 11)])
    for first in (1, 6):
        tier.plan_backup(torch.arange(first, first + 5), torch.arange(first, first + 5), HOST)
    tier.plan_load(torch.arange(1, 11), torch.arange(12, 22))
    tier.run_copies(nothing)
    back = read(cache, torch.arange(12, 22))
    assert back[:2] == [1.0, 2.0] and back[-4:] == [7.0, 8.0, 9.0, 10.0]


@pytest.mark.parametrize("carried", [3, 6, 8])
def test_a_share_below_the_sinks_is_a_bound(carried: int) -> None:
    """A request may take 4, 2 or 1 of 12 entries; each token is loaded once."""
    cache = RingKVCache(12, SLOTS, SHAPE, torch.float32, "cpu")
    of_cache = group(cache, Reach(2, 2))
    tier = HostTier([of_cache], carried=carried)
    chosen = tier._chosen(of_cache, torch.ones(8, dtype=torch.bool)).tolist()
    assert chosen == {3: [0, 1, 6, 7], 6: [0, 1], 8: [0]}[carried]


def test_host_memory_is_taken_as_it_is_write_kv() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, at(1, 2), [1.0, 2.0])
    before, pool = resident(), 1 << 25
    tier.plan_backup(at(1, 2), at(30, 31), pool)
    tier.run_copies(nothing)
    # A token's K/V is 8 bytes, and a byte tells whether it lives.
    assert resident() - before < pool * 2


def test_copies_are_made_in_the_order_of_sglangs_plans() -> None:
    """A slot that is loaded, backed up elsewhere and loaded again, before any forward."""
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, at(1, 2), [1.0, 2.0])
    tier.plan_backup(at(1), at(30), HOST)
    tier.plan_load(at(30), at(2))
    tier.plan_backup(at(2), at(31), HOST)
    tier.plan_load(at(31), at(3))
    assert read(cache, at(2, 3)) == [2.0, None]
    tier.run_copies(nothing)
    assert read(cache, at(1, 2, 3)) == [1.0, 1.0, 1.0]


class Arrival:
    """An event of a device."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True

    def record(self) -> None:
        pass


def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    """Events of a device that reaches an event when the host waits for it."""
    made: list[Arrival] = []

    def event(_device: object) -> Arrival:
        made.append(Arrival())
        return made[-1]

    monkeypatch.setattr(staging, "_event", event)
    return made


def test_a_load_waits_for_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup by itself does not make the host wait; what is lost after it stays lost."""
    events = arrivals(monkeypatch)
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, at(1, 2), [1.0, 2.0])
    tier.plan_backup(at(1, 2), at(30, 31), HOST)
    tier.plan_loss(at(31))
    tier.run_copies(nothing)
    assert not events[0].reached
    tier.plan_load(at(30, 31), at(5, 6))
    tier.run_copies(nothing)
    assert events[0].reached and read(cache, at(5, 6)) == [1.0, None]


def test_a_step_leaves_what_the_host_would_wait_for_to_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece while there is no room for it, and a load while a backup is on its way."""
    events = arrivals(monkeypatch)
    # Four pieces.
    monkeypatch.setattr(staging, "RING", 128)
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))

    def steps(arrived: bool) -> None:
        for _ in range(6):
            for event in events:
                event.reached |= arrived
            tier.run_copies(nothing, at())
            if arrived:
                tier._staging.wait()

    write(cache, torch.arange(1, 11), [float(slot) for slot in range(1, 11)])
    tier.plan_backup(torch.arange(1, 11), torch.arange(30, 40), HOST)
    steps(arrived=False)
    assert [event.reached for event in events] == [False] * 4
    steps(arrived=True)
    assert len(events) == 5
    tier.plan_backup(at(1), at(30), HOST)
    tier.plan_load(torch.arange(30, 40), torch.arange(11, 21))
    steps(arrived=False)
    assert not events[-1].reached and read(cache, torch.arange(11, 21)) == [None] * 10
    steps(arrived=True)
    assert read(cache, torch.arange(11, 21)) == read(cache, torch.arange(1, 11))


def test_a_backup_that_frees_its_slots_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --hicache-write-policy write_back the forward writes to them, and so behind a load."""
    arrivals(monkeypatch)
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    write(cache, at(1, 2), [1.0, 2.0])
    tier.plan_backup(at(1), at(30), HOST, frees=True)
    tier.plan_load(at(30), at(5))
    tier.plan_backup(at(2), at(31), HOST, frees=True)
    tier.run_copies(nothing, at(1, 2))
    write(cache, at(1, 2), [-1.0, -1.0])
    tier.plan_load(at(30, 31), at(6, 7))
    tier.run_copies(nothing)
    assert read(cache, at(5, 6, 7)) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("window", [None, 8])
def test_a_step_reads_nothing_of_a_slots_last_owner(window: int | None) -> None:
    """Between the plan and the worker's next forward nothing is read. (Without `follow` at its
    beginning, or without `forget`, the prompt's cached tokens have the K/V that was there.)"""
    worker = worker_of(window, hierarchical=True)
    poison = torch.full((12, *worker.drafter.groups[0].cache.kv.shape[1:]), 1e4)
    slots = worker.req_to_token[1, :12].long()
    write_kv(worker.drafter.groups[0].cache, slots, poison)
    worker.host_tier.plan_load(torch.arange(12), slots)
    worker.forward_batch_generation(prefill_of([12], [16]))
    seen = draft_kv(worker, worker.req_to_token[1, :16].long())
    assert seen[:12].isnan().all() and seen[12:].abs().max() < 1e4


def test_a_server_that_sends_draft_kv_sends_nothing_of_a_slots_last_owner() -> None:
    """It sends slots as they are. What is not loaded back is zeros."""
    cache = TaggedKVCache(SLOTS, SHAPE, torch.float8_e4m3fn, "cpu")
    tier = HostTier([group(cache, Reach())], carried=1, sends=True)
    write(cache, at(1, 2, 5, 6, 7), [1.0, 2.0, 3.0, 4.0, 5.0])
    tier.plan_backup(at(1, 2), at(30, 31), HOST)
    tier.plan_loss(at(31))
    tier.plan_load(at(30, 31), at(5, 6))
    tier.run_copies(nothing)
    assert read(cache, at(5, 6, 7)) == [1.0, None, 5.0]
    assert cache.kv[6].float().eq(0).all()


def test_what_waits_is_absorbed_before() -> None:
    worker, order = worker_of(None, hierarchical=True), list[str]()
    worker._pending_context.absorb = lambda: order.append("absorb")
    worker.host_tier._planned.append(lambda: iter([order.append("copy") or 1]))
    worker.forward_batch_generation(prefill_of([0], [4]))
    assert order[:2] == ["absorb", "copy"]


def test_sglang_tells_the_tier() -> None:
    """The tier gets arguments and results of SGLang's functions, with their own names; otherwise
    it cannot know that slots have other tokens."""
    pool = SimpleNamespace(alloc=lambda n, **_: torch.arange(n) + 30, logical_size=HOST,
                           resolve_host_transfers=lambda *_, **__: None)  # fmt: skip
    allocator = SimpleNamespace(alloc=lambda n: torch.arange(n) + 5)
    tier, cache = of(TaggedKVCache(SLOTS, SHAPE, torch.float32, "cpu"))
    tier.attach(allocator)
    anchor = SimpleNamespace(host_pool=object(), host_evict_fn=None)
    pool.anchor_entry = anchor
    controller: Any = SimpleNamespace(
        mem_pool_host=pool, mem_pool_device_allocator=allocator, device="cpu",
        write_policy="write_through", write_queue=[], load_queue=[],
        _uses_shared_host_domain=lambda _: False,
        _resolve_device_transfers=lambda *_, **__: None,
    )  # fmt: skip

    def theirs(name: str) -> Callable[..., Any]:
        return original(f"{CONTROLLER}.{name}")

    controller.allocate_host_transfers = lambda *args, **named: theirs("allocate_host_transfers")(
        controller, *args, **named
    )
    write(cache, at(1, 2), [1.0, 2.0])
    kept = theirs("write")(controller, at(1, 2), node_id=1, extra_pools=None, flush=False)
    host_tier.backs_up(kept, controller, at(1, 2), node_id=1, extra_pools=None, flush=False)
    named = {"host_indices": kept, "node_id": 1, "extra_pools": None}
    slots = theirs("load")(controller, **named)
    host_tier.loads(slots, controller, **named)
    tier.run_copies(nothing)
    assert read(cache, slots) == [1.0, 2.0]
    host_tier.reads_storage(at(31), controller, None, 1)
    host_tier.loads(slots, controller, **named)
    tier.run_copies(nothing)
    assert read(cache, slots) == [1.0, None]
    # Of a worker that has no tier.
    del allocator.dflash_host_tier
    host_tier.loads(slots, controller, **named)
