"""How large the draft KV cache has to be: what running requests still find of what they may see, by size and workload.

    python -m benchmarks.draft_kv_headroom [--out benchmarks/results/draft_kv_headroom.json]

Runs the real cache on simulated traffic, without a model: requests come, hit their prefix, are prefilled, commit tokens step by
step and go. Size 1.0 is what all running requests can see at once. "ring" is the same cache overwriting strictly oldest first.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.bench import measure
from sglang_dflash.core.attention.reference import context_positions
from sglang_dflash.core.kv_cache import DraftKVCache
from sglang_dflash.core.options import Options

RUNNING, BLOCK, COMMITTED, LONGEST = 16, 8, 4, 1 << 14
OPTIONS = Options(block_size=BLOCK, window=512, sinks=4)
SIZES = (0.1, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)


class OldestFirst(DraftKVCache):
    """The plain ring, for comparison: nothing counts as being in use."""

    def _mark(self, slots: Tensor, live: Tensor) -> None:
        self.in_use.zero_()

    def write(
        self, target_slots: Tensor, kv: Tensor, keep: Tensor | None = None, share: int | None = None
    ) -> None:
        super().write(target_slots, kv, keep)
        self.in_use.zero_()


@dataclass
class Turn:
    """One request: the conversation that owns its tokens, how many of them are cached, prompt and answer lengths in tokens.

    `shared`: leading tokens that belong to a prefix common to all conversations.
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
    """A quarter of the requests answers at length while short ones come and go."""
    for i in range(RUNNING // 4):
        yield Turn(i, 0, 800, 3000)
    for i in range(700):
        yield Turn(RUNNING + i, 0, rng.randint(100, 900), rng.randint(16, 64))


def shared_prompt(rng: random.Random) -> Iterator[Turn]:
    """One system prompt of 400 tokens under many short chats."""
    for i in range(400):
        yield Turn(i, 400 if i else 0, 400 + rng.randint(20, 300), rng.randint(40, 160), shared=400)


def agents(rng: random.Random) -> Iterator[Turn]:
    """As many agents as can run, each taking turns that append tool results to a growing context."""
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


def found_share(cache: DraftKVCache, turns: Iterator[Turn]) -> float:
    """Share of the tokens that proposals wanted to see and found, over the whole workload."""
    assert OPTIONS.window is not None
    waiting, wanted_tokens, found_tokens = deque(turns), 0, 0
    running: list[Turn] = []
    while waiting or running:
        while waiting and len(running) < RUNNING:
            running.append(waiting.popleft())
            _prefill(cache, running[-1])
        lengths = torch.tensor([t.length for t in running])
        positions = context_positions(
            lengths,
            min(int(lengths.max()), OPTIONS.window + OPTIONS.sinks),
            OPTIONS.window,
            OPTIONS.sinks,
        )
        slots = torch.stack([t.slots(p) for t, p in zip(running, positions, strict=True)])
        wanted = positions < lengths[:, None]
        _, live = cache.gather(slots, wanted, room=0)
        wanted_tokens, found_tokens = (
            wanted_tokens + int(wanted.sum()),
            found_tokens + int(live.sum()),
        )
        new = torch.cat([t.slots(torch.arange(t.length, t.length + BLOCK)) for t in running])
        _write(cache, new, (torch.arange(BLOCK) < COMMITTED).repeat(len(running)))
        for t in running:
            t.length += COMMITTED
        running = [t for t in running if t.length < t.prompt + t.answer]
    return found_tokens / wanted_tokens


def _prefill(cache: DraftKVCache, turn: Turn) -> None:
    assert OPTIONS.window is not None
    turn.length = turn.prompt
    positions = torch.arange(turn.cached, turn.prompt)
    seen = (positions >= turn.prompt - OPTIONS.window) | (positions < OPTIONS.sinks)
    cache.forget(turn.slots(positions[~seen]))
    _write(cache, turn.slots(positions[seen]), share=cache.num_slots // RUNNING)


def _write(
    cache: DraftKVCache, slots: Tensor, keep: Tensor | None = None, share: int | None = None
) -> None:
    if len(slots):
        cache.write(slots, torch.zeros(len(slots), *cache.entries.shape[1:]), keep, share)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unit, seed = OPTIONS.visible_tokens(RUNNING), 0
    result: dict[str, Any] = {
        "command": "python -m benchmarks.draft_kv_headroom",
        "hardware": measure.hardware(),
    }
    result |= {
        "running": RUNNING,
        "window": OPTIONS.window,
        "sinks": OPTIONS.sinks,
        "sizes": SIZES,
        "found_share": {},
    }
    print(f"{'size':26}" + "".join(f"{size:8.2f}" for size in SIZES))
    for name, turns in WORKLOADS.items():
        for policy, cls in (("", DraftKVCache), (", ring", OldestFirst)):
            row = []
            for size in SIZES:
                cache = cls(int(size * unit), LONGEST * 1024, (1, 2, 1, 1), torch.float32, "cpu")
                row.append(round(found_share(cache, turns(random.Random(seed))), 4))
            result["found_share"][name + policy] = row
            print(f"{name + policy:26}" + "".join(f"{share:8.3f}" for share in row), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
