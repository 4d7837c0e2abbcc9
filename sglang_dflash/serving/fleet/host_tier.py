"""A hierarchical cache: draft K/V follows the target's to host memory and back.

SGLang copies K/V of cached prefixes to a pool in host memory, and later into other slots of the
device's pool. It tells of each copy when it plans it (the functions at the end, by
`serving/seams.py`). The draft's part is done before the worker's next forward, in the same order:
until then nothing is written to these slots, but what is committed and not yet absorbed, which is
absorbed first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.groups import KVGroup

# Tokens that are copied at a time: device memory beyond what is reserved stays small.
PIECE = 4096
# The attribute of SGLang's allocator of device slots under which a tier is found.
_TIER = "dflash_host_tier"


class Kept(NamedTuple):
    """Draft K/V of one group in host memory, by slot of SGLang's host pool.

    Attributes:
        kv: as `DraftKVCache.kv`, 8-bit floats as bytes. Memory that is never written takes no room.
        live: bool `[host slots]`.
    """

    kv: Tensor
    live: Tensor


class HostTier:
    """Draft K/V of tokens whose target K/V is in host memory.

    Attributes:
        loaded: tokens whose target K/V came back so far.
        loaded_draft: those of them whose draft K/V came back, for the layers that see the most.
    """

    def __init__(self, groups: Sequence[KVGroup], running: int, sends: bool = False) -> None:
        """`groups`: with tags; `running`: requests, at most; `sends`: whether draft K/V goes on to
        another server, from the slots as they are."""
        self._groups, self._running, self._sends = groups, running, sends
        self._kept: list[Kept] = []
        self._planned: deque[Callable[[], None]] = deque()
        self._landing: deque[tuple[Any, Callable[[], None]]] = deque()
        self.loaded = self.loaded_draft = 0

    def attach(self, allocator: Any) -> None:
        """Let SGLang's copies from and to the slots of that allocator find this tier."""
        setattr(allocator, _TIER, self)

    def follow(self, absorb: Callable[[], Any]) -> None:
        """Do what was planned. To be called on the forward's stream, before it writes or reads
        draft K/V.

        Args:
            absorb: writes what is committed and not yet written; called if anything was planned.
        """
        self._land(wait=False)
        if not self._planned:
            return
        absorb()
        while self._planned:
            self._planned.popleft()()

    def clear(self) -> None:
        """SGLang empties its pools."""
        self._planned.clear()
        self._landing.clear()
        for kept in self._kept:
            kept.live.zero_()

    def plan_backup(self, slots: Tensor, host_slots: Tensor, pool_size: int) -> None:
        """K/V of tokens goes from device to host slots, both int64 `[N]`, in the tokens' order."""
        self._planned.append(partial(self._back_up, slots, host_slots, pool_size))

    def plan_load(self, host_slots: Tensor, slots: Tensor) -> None:
        """K/V of tokens comes back, into slots that held others. They end a prefix."""
        self.loaded += len(slots)
        self._planned.append(partial(self._load, host_slots, slots))

    def plan_loss(self, host_slots: Tensor) -> None:
        """Host slots get tokens that have no draft K/V: from storage."""
        self._planned.append(lambda: self._landing.append((None, partial(self._lose, host_slots))))

    def _back_up(self, slots: Tensor, host_slots: Tensor, pool_size: int) -> None:
        if not self._kept:
            self._kept = [_empty(_raw(group.cache.kv), pool_size) for group in self._groups]
        _used_here(slots)
        found, event = list[tuple[Kept, Tensor, Tensor, Tensor]](), _event(slots.device)
        host_slots = host_slots.cpu()
        for group, kept in zip(self._groups, self._kept, strict=True):
            some, there = (of[_last(group)].split(PIECE) for of in (slots, host_slots))
            for piece, at in zip(some, there, strict=True):
                entries, live = group.cache.find(piece)
                rows = _to_host(_raw(group.cache.kv)[entries])
                found.append((kept, at, _to_host(live), rows))
        if event is not None:
            event.record()
        self._landing.append((event, partial(self._keep, host_slots, found)))

    def _keep(
        self, host_slots: Tensor, found: Sequence[tuple[Kept, Tensor, Tensor, Tensor]]
    ) -> None:
        self._lose(host_slots)
        for kept, at, live, rows in found:
            kept.kv[at[live]] = rows[live]
            kept.live[at[live]] = True

    def _lose(self, host_slots: Tensor) -> None:
        for kept in self._kept:
            kept.live[host_slots] = False

    def _load(self, host_slots: Tensor, slots: Tensor) -> None:
        self._land(wait=True)
        _used_here(slots)
        for group in self._groups:
            # What these slots held before must not be read.
            group.cache.forget(slots)
            if self._sends:
                # Nor be sent: of a token without draft K/V, zeros are.
                _raw(group.cache.kv)[slots] = 0
        host_slots = host_slots.cpu()
        together = zip(self._groups, self._kept, strict=bool(self._kept))
        self.loaded_draft += max(
            (self._load_group(group, kept, host_slots, slots) for group, kept in together),
            default=0,
        )

    def _load_group(self, group: KVGroup, kept: Kept, host_slots: Tensor, slots: Tensor) -> int:
        # Of each part of the prefix that went to the host, its last tokens may have some.
        live = kept.live[host_slots].nonzero()[:, 0]
        if not len(live):
            return 0
        quota = group.quota(1, self._running) if group.reach.is_bounded else len(live)
        if len(live) > quota:
            # The first ones may be sinks.
            sinks = group.reach.sinks
            live = torch.cat((live[:sinks], live[sinks - quota :]))
        for some in live.split(PIECE):
            rows, there = (
                _to_device(host, slots.device) for host in (kept.kv[host_slots[some]], some)
            )
            entries = group.cache.place(slots[there], quota=quota)
            _raw(group.cache.kv)[entries] = rows
        return len(live)

    def _land(self, wait: bool) -> None:
        """Take in what has arrived on the host, in the order in which it was sent."""
        while self._landing:
            event, arrive = self._landing[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._landing.popleft()
            arrive()


def _last(group: KVGroup) -> slice:
    """Of a prefix's tokens, those that a draft after it can see."""
    tokens, sinks = group.reach.tokens, group.reach.sinks
    return slice(None) if tokens is None or sinks else slice(-tokens, None)


def _empty(kv: Tensor, pool_size: int) -> Kept:
    # Torch writes zeros, which would take the memory at once. Rows are read if they are live only.
    return Kept(
        torch.empty(pool_size, *kv.shape[1:], dtype=kv.dtype),
        torch.zeros(pool_size, dtype=torch.bool),
    )


def _raw(kv: Tensor) -> Tensor:
    """Not every device can index 8-bit floats."""
    return kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv


def _event(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).Event()


def _used_here(slots: Tensor) -> None:
    """The scheduler made them on another stream."""
    if slots.device.type != "cpu":
        slots.record_stream(torch.get_device_module(slots.device).current_stream())


def _to_host(rows: Tensor) -> Tensor:
    """Torch lets the copy go to pinned memory; the host does not wait."""
    return rows.to("cpu", non_blocking=True)


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


# -- what SGLang's controller of the hierarchical cache tells --------------------------------------


def backs_up(
    kept: Tensor | None, controller: Any, device_indices: Tensor, *_: Any, **__: Any
) -> None:
    """After `HybridCacheController.write`, which gives host slots to tokens."""
    if kept is not None:
        size = controller.mem_pool_host.logical_size
        _tell(controller, lambda tier: tier.plan_backup(device_indices, kept, size))


def loads(slots: Tensor | None, controller: Any, host_indices: Tensor, *_: Any, **__: Any) -> None:
    """After `HybridCacheController.load`, which gives slots to tokens that come back."""
    if slots is not None and len(slots):
        _tell(controller, lambda tier: tier.plan_load(host_indices, slots))


def reads_storage(kept: Tensor | None, controller: Any, *_: Any, **__: Any) -> None:
    """After `HybridCacheController.alloc_prefetch_host_buffers`, for tokens from storage."""
    if kept is not None:
        _tell(controller, lambda tier: tier.plan_loss(kept))


def _tell(controller: Any, what: Callable[[HostTier], None]) -> None:
    tier = getattr(controller.mem_pool_device_allocator, _TIER, None)
    if tier is not None:
        what(tier)
