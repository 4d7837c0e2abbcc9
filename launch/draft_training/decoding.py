"""Batched decoding with a Transformers target, made for tokens per second of one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .loops import loop_start

# Candidates per sampled token; one that is outside the nucleus is passed over.
DRAWS = 8
# Rows are dropped, and loops looked for, every so many steps.
TIDY = 16
# A cache has room for so many tokens more than it holds, before it is copied.
ROOM = 128
# Prompts that are read at a time: few on a CPU, so that what a layer computes stays in its cache.
PREFILL_ROWS = {"cpu": 8, "cuda": 128}


@dataclass
class Job:
    """A text to continue.

    Attributes:
        prompt: token ids.
        limit: new tokens at most.
        sampled: with `Nucleus`; otherwise greedy.
        tokens: new token ids; `ended` if the last of them ends the text, `looped` if it runs into
            a repetition loop, of which the second period is the last.
    """

    prompt: list[int]
    limit: int
    sampled: bool
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    looped: bool = False

    def add(self, token: int, ends: Collection[int]) -> None:
        self.tokens.append(token)
        self.ended = token in ends

    @property
    def is_done(self) -> bool:
        return self.ended or self.looped or len(self.tokens) >= self.limit

    def look_for_loop(self, keep: int) -> None:
        """Cut a loop to `keep` tokens."""
        stop = loop_start(self.tokens) + keep
        if stop < len(self.tokens):
            self.tokens, self.looped, self.ended = self.tokens[:stop], True, False


class RoomyLayer(DynamicLayer):
    """K/V of a layer that grow in place: torch's `cat` would copy all of them at every step."""

    _keys: Tensor
    _values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        held, new = self.get_seq_length(), key_states.shape[-2]
        if not held or held + new > self._keys.shape[-2]:
            self._keys, self._values = (
                F.pad(t if old is None else torch.cat((old, t), -2), (0, 0, 0, ROOM))
                for old, t in (
                    (self.keys if held else None, key_states),
                    (self.values if held else None, value_states),
                )
            )
            self.is_initialized = True
        else:
            self._keys[..., held : held + new, :] = key_states
            self._values[..., held : held + new, :] = value_states
        self.keys = self._keys[..., : held + new, :]
        self.values = self._values[..., : held + new, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        held = self.get_seq_length()
        self._keys, self._values = self._keys[indices], self._values[indices]
        self.keys, self.values = self._keys[..., :held, :], self._values[..., :held, :]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`sdpa` of one query per row without a copy of K/V for every query head of a group: the heads
    of a group are queries of one head."""
    rows, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    groups = key.shape[1]
    q = query.view(rows, groups, heads // groups, width)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(rows, 1, heads // groups, -1)
    out = F.scaled_dot_product_attention(q, key, value, attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, width), None


def fast_decoding(target: PreTrainedModel) -> PreTrainedModel:
    """`target`, with attention that decodes fast on a CPU."""
    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", sdpa_mask)
    target.set_attn_implementation("grouped")
    return target


@dataclass(frozen=True)
class Nucleus:
    """Sampling. `mass`: the smallest set of tokens with this probability is kept."""

    temperature: float = 1.0
    mass: float = 0.97

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens int64 `[R]` from logits `[R, V]`. Without a sort: of some draws from all tokens
        the first one that is inside; if none is (in 1e-12 of all cases), the likeliest."""
        p = (logits.float() / self.temperature).softmax(-1)
        cumulative = p.cumsum(-1)
        at = torch.rand(len(p), DRAWS, device=p.device) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, at).clamp_max(p.shape[-1] - 1)
        chosen, open_rows = p.argmax(-1), torch.arange(len(p), device=p.device)
        for i in range(DRAWS):
            token = drawn[open_rows, i]
            own = p[open_rows, token]
            mass_above = torch.where(p[open_rows] > own[:, None], p[open_rows], 0.0).sum(-1)
            inside = mass_above < self.mass
            chosen[open_rows[inside]] = token[inside]
            open_rows = open_rows[~inside]
            if not len(open_rows):
                break
        return chosen


@torch.inference_mode()
def write(
    target: PreTrainedModel,
    jobs: Sequence[Job],
    ends: Collection[int],
    *,
    rows: int,
    nucleus: Nucleus,
    loop_tokens: int,
    report: Callable[[int], None] = lambda new: None,
) -> None:
    """Continue all jobs, `rows` at a time.

    When few rows of a batch are left, their jobs go back to the others and are read again: that
    costs less than steps with few rows.

    Args:
        ends: tokens that end a text.
        loop_tokens: of a repetition loop so many tokens are kept.
        report: gets the number of new tokens of every step.
    """
    waiting = list(jobs)
    while waiting:
        waiting.sort(key=lambda job: len(job.prompt) + len(job.tokens), reverse=True)
        batch, waiting = waiting[:rows], waiting[rows:]
        _decode(
            target, batch, ends, nucleus, loop_tokens, len(batch) // 4 if waiting else 0, report
        )
        waiting += [job for job in batch if not job.is_done]


def _decode(
    target: PreTrainedModel,
    batch: list[Job],
    ends: Collection[int],
    nucleus: Nucleus,
    loop_tokens: int,
    few: int,
    report: Callable[[int], None],
) -> None:
    """Decode a batch until `few` jobs are left."""
    held = [job.prompt + job.tokens for job in batch]
    longest = max(map(len, held))
    device = target.device
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in held], device=device)
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in held])
    mask = mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits, cache = _read(target, ids, mask, positions)
    for step in range(max(job.limit for job in batch)):
        if step:
            logits = _forward(target, ids, mask, positions, cache)
        new = _chosen(logits, batch, nucleus)
        live = [not job.is_done for job in batch]
        for job, token, is_live in zip(batch, new.tolist(), live, strict=True):
            if is_live:
                job.add(token, ends)
        report(sum(live))
        if step % TIDY == TIDY - 1:
            for job in batch:
                job.look_for_loop(loop_tokens)
        left = [i for i, job in enumerate(batch) if not job.is_done]
        if len(left) <= few:
            break
        ids, positions = new[:, None], positions[:, -1:] + 1
        mask = F.pad(mask, (0, 1), value=1)
        if step % TIDY == TIDY - 1 and len(left) < len(batch):
            kept = torch.tensor(left, device=device)
            batch = [batch[i] for i in left]
            ids, mask, positions = ids[kept], mask[kept], positions[kept]
            cache.batch_select_indices(kept)
    for job in batch:
        job.look_for_loop(loop_tokens)


def _forward(
    target: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """Logits `[R, V]` after the last of `ids` `[R, N]`."""
    return target(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _read(
    target: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor
) -> tuple[Tensor, DynamicCache]:
    """`_forward` over prompts, a few at a time, and their K/V."""
    logits, caches, rows = [], [], PREFILL_ROWS[ids.device.type]
    for first in range(0, len(ids), rows):
        some = slice(first, first + rows)
        caches.append(DynamicCache())
        logits.append(_forward(target, ids[some], mask[some], positions[some], caches[-1]))
    whole = DynamicCache()
    whole.layers, whole.layer_class_to_replicate = [], RoomyLayer
    for i, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        whole.update(
            torch.cat([layer.keys for layer in layers]),
            torch.cat([layer.values for layer in layers]),
            i,
        )
    return torch.cat(logits), whole


def _chosen(logits: Tensor, batch: list[Job], nucleus: Nucleus) -> Tensor:
    """The next token of every job, int64 `[R]`."""
    sampled = torch.tensor([job.sampled for job in batch], device=logits.device)
    if sampled.all():
        return nucleus(logits)
    chosen = logits.argmax(-1)
    if sampled.any():
        chosen[sampled] = nucleus(logits[sampled])
    return chosen
