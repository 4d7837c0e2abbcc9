"""How large the draft KV cache has to be: the share of visible tokens that requests still find.

Runs the real cache on simulated traffic, without a model: requests arrive, hit their prefix, are
prefilled, commit tokens step by step and leave. Size 1.0 is what all running requests can see at
once. "ring" is the same cache overwriting strictly oldest first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.runner import Arms, Experiment, NoOptions, Progress, case_by_case
from sglang_dflash.drafting.attention.visibility import context_positions
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.options import ContextWindow

RUNNING, BLOCK, COMMITTED, LONGEST = 16, 8, 4, 1 << 14
WINDOW = ContextWindow(tokens=512, sinks=4)
SIZES = (0.1, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
# Draft slots that hold what all running requests see or are about to commit.
UNIT = RUNNING * (WINDOW.size + BLOCK)


class SimulatedCache:
    """The draft KV cache with entries of one number per layer. All calls into it are here."""

    KV_SHAPE = (1, 2, 1, 1)

    def __init__(self, num_entries: int, oldest_first: bool) -> None:
        num_target_slots = LONGEST * 1024
        self.cache = RingKVCache(num_entries, num_target_slots, self.KV_SHAPE, torch.float32, "cpu")
        self.quota, self.oldest_first = num_entries // RUNNING, oldest_first

    def find(self, slots: Tensor, visible: Tensor) -> int:
        """Read as a proposal does: how many of the `visible` tokens `[R, C]` have an entry."""
        entries, live = self.cache.find(slots)
        live = live & visible
        self.cache.in_use.zero_()
        self.cache.in_use[entries[live]] = True
        self._forget_use()
        return int(live.sum())

    def commit(self, slots: Tensor, keep: Tensor) -> None:
        self.cache.write(slots, self._kv(slots), keep)
        self._forget_use()

    def prefill(self, visible: Tensor, others: Tensor) -> None:
        """Enter one prompt: the slots that its drafts will see, and the others."""
        self.cache.forget(others)
        if len(visible):
            self.cache.write(visible, self._kv(visible), quota=self.quota)
            self._forget_use()

    def _kv(self, slots: Tensor) -> Tensor:
        return torch.zeros(len(slots), *self.KV_SHAPE)

    def _forget_use(self) -> None:
        if self.oldest_first:
            self.cache.in_use.zero_()


@dataclass
class Turn:
    """One request of a conversation, with lengths in tokens.

    Attributes:
        conversation: owner of the tokens.
        cached: prompt tokens that the prefix cache holds.
        shared: leading tokens of a prefix that all conversations have in common.
        length: committed tokens so far.
    """

    conversation: int
    cached: int
    prompt: int
    answer: int
    shared: int = 0
    length: int = 0

    def slots(self, positions: Tensor) -> Tensor:
        own = (self.conversation + 1) * LONGEST + positions
        return torch.where(positions < self.shared, positions, own)


def chat(rng: random.Random) -> Iterator[Turn]:
    """Three conversations per running request, whose turns come in random order."""
    lengths = dict.fromkeys(range(3 * RUNNING), 0)
    for _ in range(6):
        for i in rng.sample(sorted(lengths), len(lengths)):
            new, answer = rng.randint(40, 200), rng.randint(80, 250)
            yield Turn(i, lengths[i], lengths[i] + new, answer)
            lengths[i] += new + answer


def long_beside_short(rng: random.Random) -> Iterator[Turn]:
    """A quarter of the requests have long answers while short ones come and go."""
    for i in range(RUNNING // 4):
        yield Turn(i, 0, 800, 3000)
    for i in range(700):
        yield Turn(RUNNING + i, 0, rng.randint(100, 900), rng.randint(16, 64))


def shared_prompt(rng: random.Random) -> Iterator[Turn]:
    """One system prompt of 400 tokens before many short chats."""
    for i in range(400):
        yield Turn(i, 400 if i else 0, 400 + rng.randint(20, 300), rng.randint(40, 160), shared=400)


def agents(rng: random.Random) -> Iterator[Turn]:
    """As many agents as can run; each turn appends tool results to a growing context."""
    lengths = [2000] * RUNNING
    for turn in range(12):
        for i in range(RUNNING):
            new, answer = rng.randint(50, 800), rng.randint(30, 120)
            yield Turn(i, lengths[i] if turn else 0, lengths[i] + new, answer)
            lengths[i] += new + answer


WORKLOADS = {
    "chat": chat,
    "long beside short": long_beside_short,
    "shared prompt": shared_prompt,
    "agents": agents,
}


def found_share(cache: SimulatedCache, turns: Iterator[Turn]) -> float:
    """Share of the visible tokens that proposals found, over the whole workload."""
    waiting, visible_tokens, found_tokens = deque(turns), 0, 0
    running: list[Turn] = []
    while waiting or running:
        while waiting and len(running) < RUNNING:
            running.append(waiting.popleft())
            prefill(cache, running[-1])
        lengths = torch.tensor([t.length for t in running])
        width = min(int(lengths.max()), WINDOW.size)
        positions = context_positions(lengths, width, WINDOW)
        slots = torch.stack([t.slots(p) for t, p in zip(running, positions, strict=True)])
        visible = positions < lengths[:, None]
        found_tokens += cache.find(slots, visible)
        visible_tokens += int(visible.sum())
        new = torch.cat([t.slots(torch.arange(t.length, t.length + BLOCK)) for t in running])
        cache.commit(new, (torch.arange(BLOCK) < COMMITTED).repeat(len(running)))
        for t in running:
            t.length += COMMITTED
        running = [t for t in running if t.length < t.prompt + t.answer]
    return found_tokens / visible_tokens


def prefill(cache: SimulatedCache, turn: Turn) -> None:
    turn.length = turn.prompt
    positions = torch.arange(turn.cached, turn.prompt)
    visible = (positions >= turn.prompt - WINDOW.tokens) | (positions < WINDOW.sinks)
    cache.prefill(turn.slots(positions[visible]), turn.slots(positions[~visible]))


def workload(_: Arms, __: NoOptions, progress: Progress) -> dict[str, list[float]]:
    cases = {
        name + policy: (turns, bool(policy))
        for name, turns in WORKLOADS.items()
        for policy in ("", ", ring")
    }

    def shares(_: str, case: tuple[Any, bool]) -> list[float]:
        turns, oldest_first = case
        caches = (SimulatedCache(int(size * UNIT), oldest_first) for size in SIZES)
        return [round(found_share(cache, turns(random.Random(0))), 4) for cache in caches]

    return case_by_case(cases, shares, progress)


def report(shares: dict[str, list[float]], _: NoOptions) -> dict[str, Any]:
    return {
        "running": RUNNING,
        "window": WINDOW.tokens,
        "sinks": WINDOW.sinks,
        "sizes": SIZES,
        "found_share": shares,
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'size':26}" + "".join(f"{size:8.2f}" for size in SIZES)]
    for name, shares in result["found_share"].items():
        lines.append(f"{name:26}" + "".join(f"{share:8.3f}" for share in shares))
    return lines


EXPERIMENT = Experiment(
    name="draft_kv_headroom",
    description=__doc__,
    workload=workload,
    report=report,
    table=table,
)
