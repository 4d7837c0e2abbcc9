"""The text that the draft of the `code` pair learns from: the target's own continuations.

A shard is one batch of prompts of the same length, cut from training files, with what the target
makes of them and the hidden states that the draft will read. A cut loses one shard at most, and a
shard does not depend on those before it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .decoder import Decoder
from .figures import loop_start

WINDOW = 256
PROMPT_TOKENS = (48, 160)
BATCH = 128
# One text of three is sampled, the others are greedy.
SAMPLED, TEMPERATURE = 3, 0.7
# Of a repetition loop so many tokens are kept: the draft sees loops, but does not learn them only.
LOOP_TOKENS = 24
SHORTEST = 16
CHECK_LOOPS_EVERY = 16


@dataclass(frozen=True)
class Shard:
    """Continued prompts of one length. n texts, W `WINDOW`, E hidden size, F layers.

    Attributes:
        begin: tokens of every prompt.
        ends: int64 `[n]`, tokens of every text; what follows in its row is not to be read.
        ids: int64 `[n, W]`.
        argmax: int64 `[n, W]`, the target's greedy token after each token from `begin - 1` on.
        hidden: float16 `[n, W, (F + 1) E]`, see `Decoder.extend`.
        looped: texts that ended in a repetition loop; `dropped`: texts too short to be here.
    """

    begin: int
    ends: Tensor
    ids: Tensor
    argmax: Tensor
    hidden: Tensor
    looped: int
    dropped: int


def cut_prompts(stream: Tensor, rng: random.Random, count: int) -> Tensor:
    """int64 `[count, L]` from a token stream, of one random length L."""
    length = rng.randrange(*PROMPT_TOKENS)
    starts = [rng.randrange(len(stream) - length) for _ in range(count)]
    return torch.stack([stream[s : s + length] for s in starts])


def make_shard(
    decoder: Decoder, prompts: Tensor, ends: Sequence[int], sampled: int, seed: int
) -> Shard:
    """Continue `prompts` `[n, L]` up to `WINDOW` tokens, a token of `ends`, or into a loop.

    Every `sampled`-th text is sampled; 0 for none.
    """
    generator = torch.Generator().manual_seed(seed)
    n, begin = prompts.shape
    ids = torch.zeros(n, WINDOW, dtype=torch.int64)
    argmax = torch.zeros_like(ids)
    ids[:, :begin] = prompts
    stop = torch.full((n,), WINDOW)
    looped = 0
    seen, logits = decoder.start(prompts, WINDOW)
    hidden = torch.zeros(n, WINDOW, seen.shape[-1], dtype=torch.float16)
    hidden[:, :begin] = seen.half()
    rows = torch.arange(n)
    for at in range(begin, WINDOW):
        argmax[rows, at - 1] = greedy = logits.argmax(-1)
        token = greedy
        if sampled:
            p = (logits / TEMPERATURE).softmax(-1)
            drawn = torch.multinomial(p, 1, generator=generator)[:, 0]
            token = torch.where(rows % sampled == 0, drawn, greedy)
        ids[rows, at] = token
        for row in rows[torch.isin(token, torch.tensor(ends))].tolist():
            stop[row] = at + 1
        if (at + 1 - begin) % CHECK_LOOPS_EVERY == 0 or at + 1 == WINDOW:
            for row in rows[stop[rows] > at + 1].tolist() if at + 1 < WINDOW else rows.tolist():
                first = begin + loop_start(ids[row, begin : at + 1].tolist())
                if stop[row] > at and first + LOOP_TOKENS <= at + 1:
                    stop[row] = first + LOOP_TOKENS
                    looped += 1
        going = stop[rows] > at + 1
        # Rows of finished texts run along until a quarter of the batch is finished.
        if not going.any():
            break
        if going.float().mean() < 0.75:
            kept = going.nonzero()[:, 0]
            decoder.keep(kept)
            rows, token = rows[kept], token[kept]
        seen, logits = decoder.extend(token[:, None])
        hidden[rows, at] = seen[:, 0].half()
    long = (stop >= begin + SHORTEST).nonzero()[:, 0]
    return Shard(begin, stop[long], ids[long], argmax[long], hidden[long], looped, n - len(long))


def write_shards(
    decoder: Decoder, stream: Tensor, ends: Sequence[int], folder: Path, count: int
) -> None:
    """Write the shards 0 to `count - 1` that are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        file = folder / f"{number:04}.pt"
        if file.exists():
            continue
        began = time.process_time()
        prompts = cut_prompts(stream, random.Random(f"prompts-{number}"), BATCH)
        shard = make_shard(decoder, prompts, ends, SAMPLED, seed=number)
        spent = time.process_time() - began
        torch.save({**asdict(shard), "spent": spent}, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
        new = int((shard.ends - shard.begin).sum())
        print(
            f"continuations {number + 1}/{count}: {len(shard.ends)} texts, {new} new tokens, "
            f"{shard.looped} ended in a loop, {shard.dropped} dropped, {spent:.0f} CPU seconds",
            flush=True,
        )


def read_shard(file: Path) -> Shard:
    """Tensors are mapped from the file, and read when they are indexed."""
    state = torch.load(file, mmap=True)
    return Shard(**{name: state[name] for name in Shard.__dataclass_fields__})
