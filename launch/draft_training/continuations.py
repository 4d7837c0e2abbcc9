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
from transformers import PreTrainedModel

from .figures import loop_start

WINDOW = 256
PROMPT_TOKENS = (48, 160)
BATCH = 128
# One text of three is sampled, the others are greedy.
SAMPLED, TEMPERATURE = 3, 0.7
# Of a repetition loop so many tokens are kept: the draft sees loops, but does not learn them only.
LOOP_TOKENS = 24
SHORTEST = 16
# Texts whose hidden states are computed at a time.
ROWS = 16


@dataclass(frozen=True)
class Shard:
    """Continued prompts of one length. n texts, W `WINDOW`, E hidden size, F layers.

    Attributes:
        begin: tokens of every prompt.
        ends: int64 `[n]`, tokens of every text; what follows in its row is not to be read.
        ids: int64 `[n, W]`.
        argmax: int64 `[n, W]`, the target's greedy token after each token.
        hidden: float16 `[n, W, (F + 1) E]`, the outputs of the layers that the draft reads, and the
            final hidden states.
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


@torch.inference_mode()
def make_shard(
    target: PreTrainedModel,
    layer_ids: Sequence[int],
    prompts: Tensor,
    ends: Sequence[int],
    sampled: int,
    seed: int,
) -> Shard:
    """Continue `prompts` `[n, L]` up to `WINDOW` tokens, a token of `ends`, or into a loop.

    Every `sampled`-th text is sampled; 0 for none.
    """
    torch.manual_seed(seed)
    n, begin = prompts.shape
    drawn = torch.arange(n) % sampled == 0 if sampled else torch.zeros(n, dtype=torch.bool)
    ids = torch.zeros(n, WINDOW, dtype=torch.int64)
    for rows, how in ((~drawn, {}), (drawn, {"temperature": TEMPERATURE, "top_k": 0})):
        if rows.any():
            ids[rows] = generate(target, prompts[rows], WINDOW - begin, **how)
    new = ids[:, begin:].tolist()
    stops, looped = zip(*(text_end(tokens, ends) for tokens in new), strict=True)
    stop = begin + torch.tensor(stops)
    long = stop >= begin + SHORTEST
    ids, argmax, hidden = ids[long], [], []
    for rows in ids.split(ROWS):
        out = target(input_ids=rows, use_cache=False, output_hidden_states=True)
        layers = [out.hidden_states[i + 1] for i in layer_ids]
        hidden.append(torch.cat([*layers, out.hidden_states[-1]], dim=-1).half())
        argmax.append(out.logits.argmax(-1))
    kept = torch.cat(argmax), torch.cat(hidden)
    return Shard(begin, stop[long], ids, *kept, sum(looped), n - len(ids))


def generate(target: PreTrainedModel, prompts: Tensor, count: int, **how: float) -> Tensor:
    """int64 `[n, L + count]`: `prompts` `[n, L]` and so many tokens, ends of texts among them.
    Greedy without `how`."""
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        do_sample=bool(how),
        eos_token_id=None,
        pad_token_id=0,
        **how,
    )


def text_end(tokens: list[int], ends: Sequence[int]) -> tuple[int, bool]:
    """Where a text of `tokens` ends: after a token of `ends`, or soon after a loop has begun, of
    which the second value tells."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    loop = loop_start(tokens[:end]) + LOOP_TOKENS
    return (loop, True) if loop < end else (end, False)


def write_shards(
    target: PreTrainedModel,
    layer_ids: Sequence[int],
    stream: Tensor,
    ends: Sequence[int],
    folder: Path,
    count: int,
) -> None:
    """Write the shards 0 to `count - 1` that are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        file = folder / f"{number:04}.pt"
        if file.exists():
            continue
        began = time.process_time()
        prompts = cut_prompts(stream, random.Random(f"prompts-{number}"), BATCH)
        shard = make_shard(target, layer_ids, prompts, ends, SAMPLED, seed=number)
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
