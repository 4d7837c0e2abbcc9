"""The prompt tokens that the drafter and lookup take in, and the slots that they go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.visibility import ever_visible
from sglang_dflash.drafting.drafter import PromptWrites
from sglang_dflash.drafting.groups import ContextWrite, KVGroup
from sglang_dflash.drafting.lookup import Lookup
from sglang_dflash.serving.step.batch import ScheduleBatch, to_device


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of one prefill forward, request after request. All on the host.

    Attributes:
        batch_rows: int64 `[N]`, rows of the batch.
        positions: int64 `[N]`.
        lengths: int64 `[N]`, tokens of the token's request before its first draft.
        age: int64 `[N]`, tokens between it and its request's last one here.
    """

    batch_rows: Tensor
    positions: Tensor
    lengths: Tensor
    age: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], ends: Sequence[int], lengths: Sequence[int]) -> PromptTokens:
        """Positions `starts ... ends - 1` of requests with `lengths` tokens before their first
        draft."""
        counts = torch.tensor(ends) - torch.tensor(starts)
        batch_rows = torch.arange(len(counts)).repeat_interleave(counts)
        positions = torch.cat(
            [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        )
        age = torch.tensor(ends)[batch_rows] - 1 - positions
        return cls(batch_rows, positions, torch.tensor(lengths)[batch_rows], age)

    def to_write(self, groups: Sequence[KVGroup]) -> tuple[Tensor | slice, list[Tensor | slice]]:
        """The tokens to project, and of each group which of those it writes, in order; a slice for
        all of them."""
        wanted = list[Tensor | slice]()
        for group in groups:
            visible = ever_visible(self.positions, self.lengths, group.reach)
            wanted.append(group.cache.prompt_tokens_to_write(visible, self.age))
        lists = [numbers for numbers in wanted if isinstance(numbers, Tensor)]
        if len(lists) < len(wanted):
            return slice(None), wanted
        # Of two groups, one reads all that the other reads (`DraftConfig.groups`): the longest list
        # has all tokens of the others, in the same order.
        widest = max(lists, key=len)
        return widest, [
            slice(None)
            if len(numbers) == len(widest)
            else torch.isin(widest, numbers).nonzero()[:, 0]
            for numbers in lists
        ]


def place_prompt(
    batch: ScheduleBatch, req_to_token: Tensor, groups: Sequence[KVGroup], carried: int
) -> tuple[Tensor, Tensor, PromptWrites]:
    """Choose the prompt tokens to project and find their slots; mark the slots of all tokens dead.

    To be called before the target's forward starts. SGLang may change the request-to-token table as
    soon as that forward has read it, and a copy from the host after it would wait for it.

    Args:
        batch: the prefill.
        req_to_token: int `[rows, positions]`, the request-to-token table.
        groups: the draft KV caches, and what their layers see.
        carried: requests that run at a time, at most.

    Returns:
        Of the tokens to project, on the device: positions int64 `[N]`, slots int64 `[N]` in the
        target's KV pool, and what is written of them.
    """
    starts = batch.prefix_lens
    ends = [prefix + n for prefix, n in zip(starts, batch.extend_lens, strict=True)]
    # When the prefill is complete; a chunk is a part of it.
    lengths = [len(request.origin_input_ids) + len(request.output_ids) for request in batch.reqs]
    prompt = PromptTokens.of(starts, ends, lengths)
    on_host = torch.stack((prompt.batch_rows, prompt.positions))
    batch_rows, positions = to_device(on_host, req_to_token.device)
    table_rows = batch.req_pool_indices.long()
    slots = req_to_token[table_rows[batch_rows], positions].long()
    # What these slots held before must not be read, whether or not their tokens are written.
    for group in groups:
        group.cache.forget(slots)

    def on_device(index: Tensor | slice) -> Tensor | slice:
        return index if isinstance(index, slice) else to_device(index, req_to_token.device)

    projected, parts = prompt.to_write(groups)
    rows = on_device(projected)
    writes = [
        ContextWrite(on_device(part), group.fair_share(len(batch.reqs), carried))
        for group, part in zip(groups, parts, strict=True)
    ]
    of_rows = None if isinstance(rows, slice) else rows
    return positions[rows], slots[rows], PromptWrites(of_rows, writes)


def write_texts(batch: ScheduleBatch, lookup: Lookup) -> None:
    """Enter the tokens of requests whose prompt is complete with this prefill, those that the
    prefix cache holds included. To be called before the target's forward, as `place_prompt`."""
    table_rows = batch.req_pool_indices.long()
    decoding = batch.decoding_reqs if batch.forward_mode.is_mixed() else None
    if decoding:
        # They have their text but for the newest token, which the host may not know.
        last = to_device(torch.tensor(batch.extend_lens).cumsum(0) - 1, table_rows.device)
        lookup.write(table_rows, batch.seq_lens.long() - 1, batch.input_ids[last].long())
    decoding_ids = {id(request) for request in decoding or ()}
    prompts = {}
    for batch_row, request in enumerate(batch.reqs):
        length = len(request.origin_input_ids) + len(request.output_ids)
        end = batch.prefix_lens[batch_row] + batch.extend_lens[batch_row]
        if id(request) not in decoding_ids and end == length:
            prompts[batch_row] = [*request.origin_input_ids, *request.output_ids]
    _write_whole(prompts, table_rows, lookup)


def write_texts_taken_over(batch: ScheduleBatch, lookup: Lookup) -> None:
    """Enter the tokens of requests that another server has prefilled, but for the bonus token."""
    texts = [[*request.origin_input_ids, *request.output_ids][:-1] for request in batch.reqs]
    _write_whole(dict(enumerate(texts)), batch.req_pool_indices.long(), lookup)


def _write_whole(texts: Mapping[int, list[int]], table_rows: Tensor, lookup: Lookup) -> None:
    """Enter whole texts.

    Args:
        texts: by row of the batch.
        table_rows: int64 `[R]`, rows of SGLang's request-to-token table.
    """
    if not texts:
        return
    entered = [
        torch.stack((torch.full((len(tokens),), row), torch.arange(len(tokens)), tokens))
        for row, tokens in ((row, torch.tensor(text)) for row, text in texts.items())
    ]
    batch_rows, positions, tokens = to_device(torch.cat(entered, 1), table_rows.device)
    lookup.write(table_rows[batch_rows], positions, tokens)
