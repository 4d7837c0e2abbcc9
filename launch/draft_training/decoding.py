"""Batched decoding with a Transformers target, for the most tokens per second on one device."""

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

# Draws per sampled token; draws outside of the nucleus are skipped.
DRAWS = 8
# Steps between two checks for loops, after which finished rows are dropped.
TIDY = 16
# Tokens by which a KV cache grows when it is full.
ROOM = 128
# Prompts per prefill: few on a CPU, so that a layer's activations stay in the CPU's cache.
PREFILL_ROWS = {"cpu": 8, "cuda": 128}


@dataclass
class DecodingJob:
    """A text to continue.

    Attributes:
        prompt: token ids.
        limit: the most new tokens.
        sampled: sample with `Nucleus`; greedy otherwise.
        tokens: new token ids.
        ended: the last token ends the text.
        looped: the text ran into a repetition loop, and was cut there.
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

    def look_for_loop(self, tail: int) -> None:
        """Cut the text `tail` tokens after the start of a repetition loop, if it has one."""
        stop = loop_start(self.tokens) + tail
        if stop < len(self.tokens):
            self.tokens, self.looped, self.ended = self.tokens[:stop], True, False


class GrowingKV(DynamicLayer):
    """K/V of a layer that grows in place. torch's `cat` would copy everything at every step."""

    _keys: Tensor
    _values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        length, new = self.get_seq_length(), key_states.shape[-2]
        if not length or length + new > self._keys.shape[-2]:
            self._keys, self._values = (
                F.pad(t if old is None else torch.cat((old, t), -2), (0, 0, 0, ROOM))
                for old, t in (
                    (self.keys if length else None, key_states),
                    (self.values if length else None, value_states),
                )
            )
            self.is_initialized = True
        else:
            self._keys[..., length : length + new, :] = key_states
            self._values[..., length : length + new, :] = value_states
        self.keys = self._keys[..., : length + new, :]
        self.values = self._values[..., : length + new, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self._keys, self._values = self._keys[indices], self._values[indices]
        self.keys, self.values = self._keys[..., :length, :], self._values[..., :length, :]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by `sdpa`. With one query per row, the query heads of a group become queries of one
    head, so that K/V is not repeated for each of them."""
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
    """Set an attention that decodes fast on a CPU, if it can compute the target's.

    Returns:
        `target`.

    Raises:
        ValueError: the target has recurrent layers, whose states are not batched here.
    """
    config = target.config.get_text_config()
    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        raise ValueError(
            f"{config.name_or_path or config.model_type}: a target with recurrent layers; drafts "
            "of these are trained by other libraries only"
        )
    attention = "eager"
    # SDPA has no sinks and no cap of the scores, and would leave them out.
    if target._supports_sdpa and not getattr(config, "attn_logit_softcapping", None):
        attention = "grouped"
        AttentionInterface.register(attention, grouped_attention)
        AttentionMaskInterface.register(attention, sdpa_mask)
    target.set_attn_implementation(attention)
    return target


@dataclass(frozen=True)
class Nucleus:
    """Nucleus sampling. `mass`: the smallest set of tokens with this probability is kept."""

    temperature: float = 1.0
    mass: float = 0.97

    def __call__(self, logits: Tensor) -> Tensor:
        """Sample tokens int64 `[R]` from logits `[R, V]`, without a sort: the first of some draws
        from all tokens that is in the nucleus. If none is (1e-12 of cases), the likeliest."""
        p = (logits.float() / self.temperature).softmax(-1)
        cumulative = p.cumsum(-1)
        at = torch.rand(len(p), DRAWS, device=p.device) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, at).clamp_max(p.shape[-1] - 1)
        chosen, open_rows = p.argmax(-1), torch.arange(len(p), device=p.device)
        for i in range(DRAWS):
            token = drawn[open_rows, i]
            token_p = p[open_rows, token]
            mass_above = torch.where(p[open_rows] > token_p[:, None], p[open_rows], 0.0).sum(-1)
            inside = mass_above < self.mass
            chosen[open_rows[inside]] = token[inside]
            open_rows = open_rows[~inside]
            if not len(open_rows):
                break
        return chosen


@torch.inference_mode()
def write(
    target: PreTrainedModel,
    jobs: Sequence[DecodingJob],
    ends: Collection[int],
    *,
    rows: int,
    nucleus: Nucleus,
    loop_tokens: int,
    report: Callable[[int], None] = lambda new: None,
) -> None:
    """Continue all jobs, `rows` at a time.

    When few rows of a batch are unfinished, their jobs are prefilled again with the next batch,
    which costs less than steps with few rows.

    Args:
        ends: tokens that end a text.
        loop_tokens: tokens of a repetition loop that are kept.
        report: called with the number of new tokens of every step.
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
    batch: list[DecodingJob],
    ends: Collection[int],
    nucleus: Nucleus,
    loop_tokens: int,
    few: int,
    report: Callable[[int], None],
) -> None:
    """Decode a batch until `few` jobs are unfinished."""
    texts = [job.prompt + job.tokens for job in batch]
    longest = max(map(len, texts))
    device = target.device
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    mask = mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits, cache = _read(target, ids, mask, positions)
    for step in range(max(job.limit for job in batch)):
        if step:
            logits = _forward(target, ids, mask, positions, cache)
        new = _choose(logits, batch, nucleus)
        live = [not job.is_done for job in batch]
        for job, token, is_live in zip(batch, new.tolist(), live, strict=True):
            if is_live:
                job.add(token, ends)
        report(sum(live))
        if step % TIDY == TIDY - 1:
            for job in batch:
                job.look_for_loop(loop_tokens)
        running = [i for i, job in enumerate(batch) if not job.is_done]
        if len(running) <= few:
            break
        ids, positions = new[:, None], positions[:, -1:] + 1
        mask = F.pad(mask, (0, 1), value=1)
        if step % TIDY == TIDY - 1 and len(running) < len(batch):
            running_rows = torch.tensor(running, device=device)
            batch = [batch[i] for i in running]
            ids, mask, positions = ids[running_rows], mask[running_rows], positions[running_rows]
            cache.batch_select_indices(running_rows)
    for job in batch:
        job.look_for_loop(loop_tokens)


def _forward(
    target: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """Return logits `[R, V]` after the last of `ids` `[R, N]`."""
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
    """Prefill prompts, a few at a time. Returns the last logits `[R, V]` and K/V of all."""
    logits, caches, rows = [], [], PREFILL_ROWS[ids.device.type]
    for first in range(0, len(ids), rows):
        chunk = slice(first, first + rows)
        caches.append(DynamicCache())
        logits.append(_forward(target, ids[chunk], mask[chunk], positions[chunk], caches[-1]))
    joined = DynamicCache()
    joined.layers, joined.layer_class_to_replicate = [], GrowingKV
    for i, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        joined.update(
            torch.cat([layer.keys for layer in layers]),
            torch.cat([layer.values for layer in layers]),
            i,
        )
    return torch.cat(logits), joined


def _choose(logits: Tensor, batch: list[DecodingJob], nucleus: Nucleus) -> Tensor:
    """Choose the next token of every job, int64 `[R]`."""
    sampled = torch.tensor([job.sampled for job in batch], device=logits.device)
    if sampled.all():
        return nucleus(logits)
    chosen = logits.argmax(-1)
    if sampled.any():
        chosen[sampled] = nucleus(logits[sampled])
    return chosen
