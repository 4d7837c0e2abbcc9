"""A draft with sliding and full layers against a reference that computes everything anew: prefix
hits, branches, chunks of prompts, rejected tokens, slots that are used again, rings that overwrite.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafting import drafter
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter, PromptWrites
from sglang_dflash.drafting.groups import ContextWrite
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model, read_tensors, save_model
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.serving.step.prefill import PromptTokens
from tests.conftest import random_model, raw_config
from tests.drafting.reference import draft_block
from tests.serving.start.test_draft_memory import BACKENDS

SLIDING = 6
RAW = raw_config(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=SLIDING,
)
BLOCK, RUNNING, ROWS, COLUMNS, SLOTS = 4, 3, 4, 40, 90


@dataclass
class Request:
    """Its tokens, by their contents and by their target slots; and those that it computed."""

    row: int
    contents: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)


class Pool:
    """A target pool with a prefix cache that forgets the oldest first, and a drafter over it."""

    def __init__(self, folder: Any, backend: str, window: int | None, entries: int | None) -> None:
        save_model(random_model(RAW), RAW, folder, torch.float32)
        model = load_model(folder, dtype=torch.float32)
        self.tensors, self.embed = read_tensors(folder), torch.randn(64, 32)
        self.window = window
        options = Options(window=window, draft_kv_tokens=entries).resolve(model.config)
        plan = Plan.of_draft(model, options, backend, BACKENDS[backend], RUNNING)
        self.groups = plan.groups(SLOTS - 1, SLOTS, ROWS, COLUMNS, carried=RUNNING)
        head = TargetHead(lambda ids: self.embed[ids], self._logits)
        self.drafter = Drafter(model, head, self.groups, options)
        self.features = model.config.target_hidden_width
        self.table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
        self.free, self.running = list(range(1, SLOTS)), dict[int, Request]()
        self.ended: list[Request] = []
        self.random, self.contents = random.Random(1), 0
        self.seen = Counter[str]()

    def _logits(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return hidden @ self.embed.T

    @cache  # noqa: B019
    def of(self, content: int) -> Tensor:
        """Hidden states of the target for a token."""
        return torch.randn(self.features, generator=torch.Generator().manual_seed(content))

    def slot(self) -> int:
        while not self.free:
            self.ended.pop(0)
            held = {s for r in (*self.ended, *self.running.values()) for s in r.slots}
            self.free = [slot for slot in range(1, SLOTS) if slot not in held]
        return self.free.pop()

    def extend(self, request: Request, count: int) -> None:
        """Enter new tokens at its end."""
        for _ in range(count):
            self.contents += 1
            slot = self.slot()
            self.table[request.row, len(request.slots)] = slot
            request.own.add(len(request.slots))
            request.contents.append(self.contents)
            request.slots.append(slot)

    def start(self, row: int) -> None:
        request, hit = Request(row), 0
        if self.ended and self.random.random() < 0.7:
            donor = self.random.choice(self.ended)
            hit = self.random.randint(1, len(donor.slots) - BLOCK)
            request.contents, request.slots = donor.contents[:hit], donor.slots[:hit]
            self.table[row, :hit] = torch.tensor(request.slots)
            self.seen["prefix hit"] += 1
        self.running[row] = request
        new = self.random.randint(1, 14)
        self.extend(request, min(new, COLUMNS - 4 * BLOCK - hit))
        length, middle = len(request.slots), self.random.randint(hit, len(request.slots) - 1)
        for first, end in ((hit, middle), (middle, length)):
            if first < end:
                self.prefill(request, first, end, length)

    def prefill(self, request: Request, first: int, end: int, length: int) -> None:
        slots = torch.tensor(request.slots[first:end])
        for group in self.groups:
            group.cache.forget(slots)
        tokens = PromptTokens.of([first], [end], [length])
        kept, parts = tokens.to_write(self.groups)
        hidden = torch.stack([self.of(c) for c in request.contents[first:end]])
        writes = [ContextWrite(part, group.cache.num_entries // RUNNING)
                  for group, part in zip(self.groups, parts, strict=True)]  # fmt: skip
        rows = None if isinstance(kept, slice) else kept
        prompt = PromptWrites(rows, writes)
        self.drafter.absorb(hidden, tokens.positions[kept], slots[kept], prompt=prompt)

    def step(self) -> None:
        """Compare a proposal of all running requests with the reference, then commit."""
        requests = list(self.running.values())
        lengths = torch.tensor([len(r.slots) for r in requests])
        bonus = torch.randint(0, 63, (len(requests),))
        rows = torch.tensor([r.row for r in requests])
        known = RequestSlots(self.table, rows, lengths, int(lengths.max()))
        self.drafter.propose(bonus, known)
        hidden = self.hidden.view(len(requests), BLOCK - 1, -1).clone()
        for request, token, found in zip(requests, bonus.tolist(), hidden, strict=True):
            self.compare(request, token, found)
        for request in requests:
            self.commit(request)

    def compare(self, request: Request, bonus: int, found: Tensor) -> None:
        lost = {}
        for group in self.groups:
            live = group.cache.find(torch.tensor(request.slots))[1]
            dead = {p for p, there in enumerate(live.tolist()) if not there}
            reach, length = group.reach, len(request.slots)
            sees = {p for p in range(length) if reach.tokens is None or p >= length - reach.tokens}
            kind = "sliding_attention" if 0 in group.layer_group.numbers else "full_attention"
            lost[kind] = dead & sees
            self.seen[f"lost in {kind}"] += len(dead & sees)
            self.seen["lost of its own"] += len(dead & sees & request.own)
        target = torch.stack([self.of(content) for content in request.contents])
        expected, _ = draft_block(
            self.tensors, RAW, target, bonus, self.embed, BLOCK, self.window, lost=lost
        )
        torch.testing.assert_close(found, expected[1:], atol=3e-5, rtol=3e-5)

    def commit(self, request: Request) -> None:
        start, kept = len(request.slots), self.random.randint(1, BLOCK)
        self.extend(request, BLOCK)
        slots = torch.tensor(request.slots[start:])
        hidden = torch.stack([self.of(c) for c in request.contents[start:]])
        positions = torch.arange(start, start + BLOCK)
        self.drafter.absorb(hidden, positions, slots, committed=torch.arange(BLOCK) < kept)
        self.free += request.slots[start + kept :]
        del request.slots[start + kept :], request.contents[start + kept :]

    def run(self, steps: int) -> Counter[str]:
        for _ in range(steps):
            for row in range(1, RUNNING + 1):
                if row not in self.running:
                    self.start(row)
            self.step()
            for row, request in list(self.running.items()):
                if len(request.slots) > COLUMNS - 3 * BLOCK or self.random.random() < 0.3:
                    self.ended.append(self.running.pop(row))
        return self.seen


@pytest.mark.parametrize(
    ("backend", "window", "entries"),
    [("torch", None, None), ("torch", 9, None), ("torch", None, 14), ("pages", None, 80)],
    ids=["default", "window", "too-small", "pages"],
)
def test_every_block_is_the_references(
    backend: str,
    window: int | None,
    entries: int | None,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Prompts take several projections.
    monkeypatch.setattr(drafter, "MOST_PROJECTED", 3)
    pool = Pool(tmp_path, backend, window, entries)
    with torch.inference_mode():
        seen = pool.run(24)
    sliding, full = pool.groups
    assert sliding.layer_group.numbers == (0, 2) and isinstance(sliding.cache, RingKVCache)
    assert sliding.cache.num_entries == (entries or (RUNNING + 1) * (SLIDING + BLOCK))
    assert full.cache.has_holes == (window is not None)
    assert seen["prefix hit"] > 10
    # What a request computed itself is there as long as it can be seen, but in a ring too small.
    assert (seen["lost of its own"] > 0) == (entries == 14)
    assert seen["lost in full_attention"] == 0 or window is not None
