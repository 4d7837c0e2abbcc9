"""An extension of our worker for the soak: it poisons what must not be read, and counts rare paths.

Before every proposal, the draft K/V of all target slots that SGLang's allocator holds as free
becomes NaN. If a draft ever reads one, `nonfinite_outputs` counts it. The worker's report has the
counts as `rare_paths`, and the memory in use as `memory_in_use`.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step.extension import Extension
from sglang_dflash.serving.step.step import Step, StepObserver

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def memory_in_use() -> dict[str, int]:
    """Measure this process, without what its allocators hold for later. `malloc_bytes`: glibc's of
    all threads, torch's tensors among them (`mallinfo2`). `python_blocks`: small allocations of
    Python, which has an allocator of its own."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _MallInfo
    found = read()
    return {
        "malloc_bytes": found.uordblks + found.hblkhd,
        "python_blocks": sys.getallocatedblocks(),
    }


def free_slots(allocator: Any) -> Tensor:
    """Target slots, int64, that no request and no cached prefix holds."""
    pages = allocator.get_all_free_pages().long()
    inside = torch.arange(allocator.page_size, device=pages.device)
    return (pages[:, None] * allocator.page_size + inside).flatten()


class WatchedDrafter(Drafter):
    """DFlash's drafter over a poisoned cache."""

    rare: Counter[str]
    runner: Any

    def propose(self, bonus: Tensor, requests: RequestSlots, *how: Any) -> Any:
        free = free_slots(self.runner.token_to_kv_pool_allocator)
        for group in self.groups:
            entries, live = group.cache.find(free)
            group.cache.kv[entries[live]] = float("nan")
            self.rare["poisoned entries"] += int(live.sum())
        return super().propose(bonus, requests, *how)

    def report(self) -> dict[str, Any]:
        return {"rare_paths": dict(self.rare), "memory_in_use": memory_in_use()}


class Observer(StepObserver):
    """Checks that a step's slots are its own, and counts ends inside a block."""

    def __init__(self, runner: Any, rare: Counter[str]) -> None:
        self._runner, self._rare = runner, rare
        # Of the newest steps, requests with the tokens that they have if they keep all of the step.
        self._open: deque[list[tuple[Any, int]]] = deque()
        self._ended: set[str] = set()

    def before_step(self, batch: Any, step: Step) -> None:
        free = free_slots(self._runner.token_to_kv_pool_allocator)
        if torch.isin(step.slots.flatten(), free).any():
            raise RuntimeError("a block is written to slots that are free")

    def after_step(self, batch: Any, step: Step, accepted: Accepted, new_seq_lens: Tensor) -> None:
        pairs = zip(batch.reqs, new_seq_lens.tolist(), strict=True)
        self._open.append([(r, n - len(r.origin_input_ids) + 1) for r, n in pairs])
        if len(self._open) > 2:
            # SGLang has processed this step by now, overlapped or not.
            self._count_ends(self._open.popleft())
        lengths = accepted.lengths
        self._rare["whole block accepted"] += int((lengths == step.slots.shape[1]).sum())
        self._rare["no draft accepted"] += int((lengths == 1).sum())

    def _count_ends(self, step: list[tuple[Any, int]]) -> None:
        for request, tokens in step:
            inside = request.finished() and len(request.output_ids) < tokens
            if inside and request.rid not in self._ended:
                self._ended.add(request.rid)
                self._rare["end inside a block"] += 1
                self._rare["grammar end inside a block"] += request.grammar is not None
        self._ended &= {request.rid for step in self._open for request, _ in step}


def count_overwrites(cache: RingKVCache, rare: Counter[str]) -> None:
    """Count live entries that a write gives to another token."""
    place = cache.place

    def counted(
        target_slots: Tensor, live: Tensor | None = None, fair_share: int | None = None
    ) -> Tensor:
        everything = torch.arange(cache.num_entries)
        owner = cache.tags.owner[: cache.num_entries].long()
        was_live = (owner >= 0) & (cache.tags.entry_of[owner.clamp(min=0)] == everything)
        used = cache.tags.in_use[: cache.num_entries].clone()
        entries = place(target_slots, live, fair_share)
        now = cache.tags.owner[: cache.num_entries].long()
        lost = was_live & (now != owner) & ~torch.isin(owner, target_slots)
        rare["overwritten live entries"] += int(lost.sum())
        rare["overwritten entries in use"] += int((lost & used).sum())
        return entries

    cache.place = counted  # type: ignore[method-assign]


def replace_everywhere(original: Any, ours: Any) -> None:
    """Replace a function in all modules that have imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, ours)


def count_in_worker(rare: Counter[str]) -> None:
    """Count crossed boundaries, where the worker finds out about them."""
    due = our_batch.checkpoints_due

    def checkpoints_due(*args: Any) -> Any:
        found = due(*args)
        if found is not None:
            rare["crossed boundaries"] += int((found.steps >= 0).sum())
        return found

    replace_everywhere(due, checkpoints_due)


def extension(target_worker: Any) -> Extension:
    rare: Counter[str] = Counter()
    runner = target_worker.model_runner

    def make_drafter(*args: Any) -> WatchedDrafter:
        drafter = WatchedDrafter(*args)
        drafter.rare, drafter.runner = rare, runner
        for group in drafter.groups:
            if isinstance(group.cache, RingKVCache):
                count_overwrites(group.cache, rare)
        return drafter

    count_in_worker(rare)
    return Extension(make_drafter=make_drafter, observer=Observer(runner, rare))
