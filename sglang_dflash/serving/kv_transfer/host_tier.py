"""A hierarchical cache: draft K/V follows the target's to host memory and back.

SGLang copies K/V of cached prefixes to a pool in host memory, and later into other slots of the
device's pool. It tells of each copy when it plans it (the functions at the end, by
`serving/patches.py`). The draft's part is done in the same order, before the worker's next forward:
until then nothing is written to these slots, but what is committed and not yet absorbed, which is
absorbed first. What would hold up the forward for long is done before later ones, if the slots are
still the same tokens' then.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.attention.table import PADDING_SLOT
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import indexable
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.serving.kv_transfer.staging import NUMBER, Staging, StagingBuffer, page_locked

# Tokens that are copied at a time, at most: device memory beyond what is reserved stays small.
PIECE = 4096
# A smaller piece holds up a forward as one of so many tokens.
LEAST = 64
# What a copy yields in place of tokens while the host would have to wait: a later forward goes on.
LATER = inf
# The attribute of SGLang's allocator of device slots under which a tier is found.
_TIER = "dflash_host_tier"


class HostKV(NamedTuple):
    """Draft K/V of one group in host memory, by slot of SGLang's host pool.

    Attributes:
        kv: as `DraftKVCache.kv`, 8-bit floats as bytes. Memory that is never written takes no room.
        live: bool `[host slots]`.

    Both are used by the staging's thread only, and while it has nothing to do.
    """

    kv: Tensor
    live: Tensor


class HostTier:
    """Draft K/V of tokens whose target K/V is in host memory.

    Attributes:
        loaded: tokens whose target K/V came back so far.
    """

    def __init__(self, groups: Sequence[KVGroup], carried: int, sends: bool = False) -> None:
        """`groups`: with tags; `carried`: requests that run at a time, at most; `sends`: whether
        draft K/V goes on to another server, from the slots as they are."""
        # Narrow windows come first: their copies are short, and need not wait for a long one.
        self._groups = sorted(groups, key=lambda group: group.reach.tokens_read(sys.maxsize))
        self._carried, self._sends = carried, sends
        tags = groups[0].cache.tags
        if tags is None:
            raise ValueError("groups: every token has draft K/V; tags are required")
        device = tags.entry_of.device
        self._staging = Staging(device)
        self._host_kv: list[HostKV] = []
        self._planned: deque[Callable[[], Iterator[float]]] = deque()
        # The rest of each copy that has begun. `_generation` numbers the copies; by slot, the one
        # that claimed it last, 0 if a forward has written to it since.
        self._begun: deque[Iterator[float]] = deque()
        self._generations, self._generation = torch.zeros_like(tags.entry_of), 0
        # Whether slots that are backed up become other tokens' at once.
        self._frees = False
        self.loaded = 0
        # Tokens whose draft K/V came back: only the device knows. And the host's copy.
        self._placed = torch.zeros(1, dtype=torch.int64, device=device)
        self._placed_seen = page_locked(NUMBER, device).view(torch.int64).zero_()

    @property
    def loaded_draft(self) -> int:
        """Those of `loaded` whose draft K/V has come back, for the layers that see the most, up to
        the newest copy that the device has finished."""
        return int(self._placed_seen)

    def attach(self, allocator: Any) -> None:
        """Let SGLang's copies from and to the slots of that allocator find this tier."""
        setattr(allocator, _TIER, self)

    def run_copies(self, absorb: Callable[[], Any], slots: Tensor | None = None) -> bool:
        """Copy what was planned. To be called on the forward's stream, before it writes or reads
        draft K/V. Returns whether there was anything.

        Args:
            absorb: writes what is committed and not yet written; called if anything was planned.
            slots: int64 `[N]`, where the forward will write. As many tokens are copied, and a piece
                more; the others before later forwards, as what the host would wait for. None
                copies all that was planned.
        """
        self._staging.poll()
        if not (self._begun or self._planned):
            return False
        if self._planned:
            absorb()
        left = inf
        # What another server gets is what is there after the forward.
        if slots is not None and not self._sends:
            left = sum(self._piece(group) + len(slots) for group in self._groups)
        while left > 0 and (self._begun or self._planned):
            if not self._begun:
                self._begun.append(self._planned.popleft()())
            tokens = next(self._begun[0], None)
            if tokens is None:
                self._begun.popleft()
            elif tokens == LATER and (left == inf or self._frees):
                self._staging.wait()
            else:
                left -= max(tokens, LEAST)
        while self._planned:
            # The forward must not read what these slots held, nor be overwritten by a late copy.
            self._begun.append(self._planned.popleft()())
        if self._begun and slots is not None:
            self._generations.index_fill_(0, slots, 0)
        return True

    def clear(self) -> None:
        """SGLang empties its pools."""
        self._planned.clear()
        self._begun.clear()
        for host_kv in self._host_kv:
            self._staging.enqueue(host_kv.live.zero_)

    def plan_backup(
        self, slots: Tensor, host_slots: Tensor, pool_size: int, frees: bool = False
    ) -> None:
        """K/V of tokens goes from device to host slots, both int64 `[N]`, in the tokens' order.

        `frees`: SGLang makes the backup to free the slots. Then it cannot be left to a later step.
        """
        self._frees = frees
        self._planned.append(partial(self._back_up, slots, host_slots, pool_size))

    def plan_load(self, host_slots: Tensor, slots: Tensor) -> None:
        """K/V of tokens comes back, into slots that held others. They end a prefix."""
        self.loaded += len(slots)
        self._planned.append(partial(self._load, host_slots, slots))

    def plan_loss(self, host_slots: Tensor) -> None:
        """Host slots get tokens that have no draft K/V: from storage."""
        self._planned.append(partial(self._lose, host_slots))

    def _claim(self, slots: Tensor) -> int:
        _used_here(slots)
        self._generation += 1
        self._generations.index_fill_(0, slots, self._generation)
        return self._generation

    def _piece(self, group: KVGroup) -> int:
        return min(PIECE, Staging.most_rows(group.cache.kv[0]))

    def _back_up(self, slots: Tensor, host_slots: Tensor, pool_size: int) -> Iterator[float]:
        if not self._host_kv:
            self._host_kv = [_empty(indexable(group.cache.kv), pool_size) for group in self._groups]
        return self._pieces_out(slots, host_slots.cpu(), self._claim(slots))

    def _pieces_out(self, slots: Tensor, host_slots: Tensor, generation: int) -> Iterator[float]:
        yield from self._lose(host_slots)
        for group, host_kv in zip(self._groups, self._host_kv, strict=True):
            pieces, host_pieces = (
                indices[_visible(group.reach, len(slots))].split(self._piece(group))
                for indices in (slots, host_slots)
            )
            for piece, at in zip(pieces, host_pieces, strict=True):
                yield from self._until_room(host_kv, len(piece))
                entries, live = group.cache.find(piece)
                live &= self._generations[piece] == generation
                rows = indexable(group.cache.kv)[entries]
                self._staging.send(rows, live, partial(_store, host_kv, at))
                yield len(piece)

    def _until_room(self, host_kv: HostKV, rows: int) -> Iterator[float]:
        """Until so many rows can be sent or fetched."""
        while not self._staging.has_room((rows, *host_kv.kv.shape[1:]), host_kv.kv.dtype):
            yield LATER

    def _lose(self, host_slots: Tensor) -> Iterator[float]:
        for host_kv in self._host_kv:
            self._staging.enqueue(partial(host_kv.live.index_fill_, 0, host_slots.cpu(), False))
        yield from ()

    def _load(self, host_slots: Tensor, slots: Tensor) -> Iterator[float]:
        generation = self._claim(slots)
        for group in self._groups:
            # What these slots held before must not be read.
            group.cache.forget(slots)
            if self._sends:
                # Nor be sent: of a token without draft K/V, zeros are.
                indexable(group.cache.kv)[slots] = 0
        return self._pieces_in(host_slots.cpu(), slots, generation)

    def _pieces_in(self, host_slots: Tensor, slots: Tensor, generation: int) -> Iterator[float]:
        # Host memory is read once everything that was sent before is there.
        while not self._staging.is_idle:
            yield LATER
        begun = deque[tuple[KVGroup, StagingBuffer]]()
        for group, host_kv, piece in self._pieces_to_load(host_slots):
            yield from self._until_room(host_kv, len(piece))
            begun.append((group, self._staging.fetch(host_kv.kv, host_slots[piece], piece)))
            # The thread then has something to do meanwhile.
            if len(begun) > 1:
                yield self._land(*begun.popleft(), slots, generation)
        for group, buffer in begun:
            yield self._land(group, buffer, slots, generation)

    def _pieces_to_load(self, host_slots: Tensor) -> list[tuple[KVGroup, HostKV, Tensor]]:
        """The pieces of a prefix to load: int64 numbers of its tokens, of those that the host
        has."""
        loads = list[tuple[KVGroup, HostKV, Tensor]]()
        for group, host_kv in zip(self._groups, self._host_kv, strict=bool(self._host_kv)):
            tokens = self._chosen(group, host_kv.live[host_slots])
            pieces = list(tokens.split(self._piece(group))) if len(tokens) else []
            # Drafts need the last tokens most. But what a ring gets last stays longest.
            ordered = pieces if group.reach.is_bounded else reversed(pieces)
            loads += [(group, host_kv, piece) for piece in ordered]
        return loads

    def _land(self, group: KVGroup, buffer: StagingBuffer, slots: Tensor, generation: int) -> int:
        """Write the draft K/V of a piece that was fetched. Returns its tokens."""
        rows, tokens = self._staging.to_device(buffer)
        at = slots[tokens]
        live = self._generations[at] == generation
        # A slot that is another token's by now stays as it is.
        at = torch.where(live, at, PADDING_SLOT)
        entries = group.cache.place(at, live, self._fair_share(group))
        indexable(group.cache.kv)[entries] = rows
        if group is self._groups[-1]:
            self._placed.add_((entries >= 0).sum())
            self._placed_seen.copy_(self._placed, non_blocking=True)
        return len(rows)

    def _chosen(self, group: KVGroup, live: Tensor) -> Tensor:
        """Return the tokens of a prefix to load, int64, of those that the host has, bool `[N]`. Of
        each part of the prefix that was copied to the host, only the last tokens may be there."""
        tokens, fair_share = live.nonzero()[:, 0], self._fair_share(group)
        if fair_share is None:
            return tokens
        # The first ones may be sinks.
        parts = group.reach.resized(fair_share).parts(len(tokens))
        return torch.cat([tokens[part] for part in parts])

    def _fair_share(self, group: KVGroup) -> int | None:
        """Tokens of a prefix that are loaded, at most; None for all."""
        if not group.reach.is_bounded:
            return None
        share = group.fair_share(1, self._carried)
        if isinstance(group.cache, RingKVCache):
            return share
        # With an entry per slot, whatever a draft can see has room.
        return max(share, group.reach.tokens_read(sys.maxsize))


def _store(host_kv: HostKV, at: Tensor, rows: Tensor, live: Tensor) -> None:
    # Whole rows are copied two to three times as fast as by an index of a mask.
    chosen = live.nonzero()[:, 0]
    if len(chosen) < len(live):
        rows, at = rows.index_select(0, chosen), at.index_select(0, chosen)
    host_kv.kv.index_copy_(0, at, rows)
    host_kv.live.index_fill_(0, at, True)


def _visible(reach: Reach, count: int) -> slice:
    """Return which of `count` tokens, a part of a prefix, a draft right after them can see."""
    _, last = reach.parts(count)
    # With sinks, all: which of them are sinks depends on where the part begins.
    return slice(0, count) if reach.sinks else last


def _empty(kv: Tensor, pool_size: int) -> HostKV:
    # Torch writes zeros, which would take the memory at once. Rows are read if they are live only.
    return HostKV(
        torch.empty(pool_size, *kv.shape[1:], dtype=kv.dtype),
        torch.zeros(pool_size, dtype=torch.bool),
    )


def _used_here(slots: Tensor) -> None:
    """The scheduler made them on another stream."""
    if slots.device.type != "cpu":
        slots.record_stream(torch.get_device_module(slots.device).current_stream())


# -- what SGLang's controller of the hierarchical cache tells --------------------------------------


def backs_up(
    host_indices: Tensor | None, controller: Any, device_indices: Tensor, *_: Any, **__: Any
) -> None:
    """After `HybridCacheController.write`, which gives host slots to tokens."""
    if host_indices is not None:
        size, frees = controller.mem_pool_host.logical_size, controller.write_policy == "write_back"
        _tell(controller, lambda tier: tier.plan_backup(device_indices, host_indices, size, frees))


def loads(slots: Tensor | None, controller: Any, host_indices: Tensor, *_: Any, **__: Any) -> None:
    """After `HybridCacheController.load`, which gives slots to tokens that come back."""
    if slots is not None and len(slots):
        _tell(controller, lambda tier: tier.plan_load(host_indices, slots))


def reads_storage(host_indices: Tensor | None, controller: Any, *_: Any, **__: Any) -> None:
    """After `HybridCacheController.alloc_prefetch_host_buffers`, for tokens from storage."""
    if host_indices is not None:
        _tell(controller, lambda tier: tier.plan_loss(host_indices))


def _tell(controller: Any, action: Callable[[HostTier], None]) -> None:
    tier = getattr(controller.mem_pool_device_allocator, _TIER, None)
    if tier is not None:
        action(tier)
