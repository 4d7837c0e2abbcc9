"""Decode steps of the drafter, recorded per batch size and replayed.

A recording has fixed shapes. Batches are padded to the next recorded size (bucket), and a table of
the whole context to the next recorded number of columns. Rows of padding read nothing, and write to
the padding slot only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.table import PADDING_SLOT, RequestSlots
from sglang_dflash.drafting.drafter import Drafter, PromptWrites
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.noise import LIKELIEST, RULES, BlockNoise, SampledBlocks

# Columns of the narrowest table of a whole context; each wider one but the last has four times as
# many.
LEAST_COLUMNS = 1024


class Recorder(Protocol):
    """Turns runs into functions that repeat them.

    A run reads and writes tensors that exist before it and stay where they are. It is executed
    before it is recorded, more than once, and what it then writes may be anything.
    """

    def record(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Return a function for each of `runs`, in their order. Raises an error of its own if one
        of them cannot be repeated without the host."""


class Key(NamedTuple):
    """The shape that a recording is for: R requests, C table columns of the draft's forward, W
    tokens of the blocks that its head drafts. Without a forward and a head it is a commit."""

    requests: int
    columns: int = 0
    width: int = 0


def default_column_buckets(columns: int) -> tuple[int, ...]:
    """Numbers of table columns to record, up to `columns`. The last one is at least twice the one
    before: what SGLang adds to a context length is not worth a recording."""
    buckets = []
    size = LEAST_COLUMNS
    while 2 * size <= columns:
        buckets.append(size)
        size *= 4
    return (*buckets, columns)


def default_batch_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes to record where SGLang names none: powers of two up to `most`, and `most`."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*sizes, most)


class GraphedDrafter:
    """A `Proposer`: the steps of a `Drafter` from recordings. What has none is run eagerly: a batch
    larger than the largest bucket, and a prompt.

    Attributes:
        replays: steps from recordings, by "propose" and "commit".
        eager: proposals that were computed without one.
    """

    def __init__(
        self,
        drafter: Drafter,
        recorder: Recorder,
        req_to_token: Tensor,
        batch_buckets: Sequence[int],
        column_buckets: Sequence[int] = (),
        widths: Sequence[int] = (),
    ) -> None:
        """Records every step.

        Args:
            req_to_token: int32 `[rows, positions]`, of all requests to come (see `RequestSlots`).
            batch_buckets: batch sizes.
            column_buckets: numbers of table columns; by default those of `default_column_buckets`,
                or one if no layer reads the whole context.
            widths: tokens of blocks that steps verify, at least 2, beside the whole block. With
                some, forwards and heads are recorded apart.
        """
        self._drafter, self._table = drafter, req_to_token
        self.groups: Sequence[KVGroup] = drafter.groups
        self.counters = drafter.counters
        self._batch_buckets = tuple(sorted(set(batch_buckets)))
        positions = req_to_token.shape[1]
        self._is_bounded = all(group.reach.is_bounded for group in drafter.groups)
        if self._is_bounded:
            column_buckets = (max(group.reach.tokens_read(positions) for group in drafter.groups),)
        self._column_buckets = tuple(
            sorted(set(column_buckets or default_column_buckets(positions)))
        )
        block = drafter.draft_block
        self._widths = tuple(sorted({block, *(width for width in widths if width < block)}))
        self.replays = {"propose": 0, "commit": 0}
        self.eager = 0
        self._buffers = _Buffers(drafter, self._batch_buckets[-1])
        self._recorder, self._graphs = recorder, self._recorded(recorder)

    def _recorded(self, recorder: Recorder) -> dict[Key, Callable[[], None]]:
        # The largest first: smaller ones reuse its memory.
        keys = [
            key
            for requests in reversed(self._batch_buckets)
            for columns in reversed(self._column_buckets)
            for width in reversed(self._widths)
            for key in (*self._keys(requests, columns, width), Key(requests))
        ]
        keys = list(dict.fromkeys(keys))
        runs = [partial(self._run, key) for key in keys]
        return dict(zip(keys, recorder.record(runs), strict=True))

    def _keys(self, requests: int, columns: int, width: int) -> tuple[Key, ...]:
        """Return the recordings that make a proposal: one, or its forward and its head."""
        if len(self._widths) == 1:
            return (Key(requests, columns, width),)
        return Key(requests, columns), Key(requests, width=width)

    def record_again(self) -> None:
        """Record every step anew, once weights are elsewhere: of the target, too, whose embedding
        and lm_head a draft borrows."""
        # Their memory is reused. As at first, what is executed reads and writes padding only.
        self._graphs = {}
        self._buffers.clear()
        with self.counters.unchanged():
            self._graphs = self._recorded(self._recorder)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that recordings read and write."""
        return self._buffers.nbytes

    def describe(self) -> dict[str, object]:
        return {
            "draft_graph_batch_sizes": list(self._batch_buckets),
            "draft_graph_columns": list(self._column_buckets),
            "draft_graph_widths": list(self._widths),
            "draft_graph_buffer_bytes": self.buffer_bytes,
        }

    def report(self) -> dict[str, int]:
        return {
            "draft_graph_proposals": self.replays["propose"],
            "draft_graph_commits": self.replays["commit"],
            "draft_eager_proposals": self.eager,
        }

    # -- what is recorded ----------------------------------------------------------------------

    def _run(self, key: Key) -> None:
        if key.columns:
            self._forward(key.requests, key.columns)
        if key.width:
            self._draft(key.requests, key.width)
        if key == Key(key.requests):
            self._commit(key.requests)

    def _forward(self, count: int, columns: int) -> None:
        buffers = self._buffers
        # A window reads no more columns than it has, however long the request.
        longest = self._table.shape[1] if self._is_bounded else columns
        requests = RequestSlots(
            self._table, buffers.rows[:count], buffers.seq_lens[:count], longest
        )
        buffers.block_hidden[:count] = self._drafter.forward(buffers.bonus[:count], requests)

    def _draft(self, count: int, width: int) -> None:
        buffers = self._buffers
        inputs = buffers.seeds, buffers.temperatures, buffers.seq_lens
        noise = BlockNoise(*(buffer[:count] for buffer in inputs))
        hidden = buffers.block_hidden[:count, :width]
        drafted = self._drafter.draft(hidden, buffers.bonus[:count], noise)
        for buffer, values in zip(buffers.drafted(count, width), drafted, strict=True):
            buffer.copy_(values)

    def _commit(self, requests: int) -> None:
        buffers, count = self._buffers, requests * self._drafter.verify_block
        self._drafter.absorb(
            buffers.hidden[:count],
            buffers.positions[:count],
            buffers.slots[:count],
            committed=buffers.committed[:count],
        )

    # -- replays -------------------------------------------------------------------------------

    def propose(
        self,
        bonus: Tensor,
        requests: RequestSlots,
        noise: BlockNoise | None = None,
        width: int | None = None,
    ) -> Tensor | SampledBlocks:
        """A recording drafts the next wider block that is recorded."""
        count = len(bonus)
        size, columns = self._size_of_proposal(count, requests)
        if size is None or columns is None:
            self.eager += 1
            return self._drafter.propose(bonus, requests, noise, width)
        self._buffers.set_proposal(size, bonus, requests, noise)
        block = self._widths[-1]
        width = _next(self._widths, min(width or block, block)) or block
        for key in self._keys(size, columns, width):
            self._graphs[key]()
        self.replays["propose"] += 1
        tokens, candidates, scores = self._buffers.drafted(size, width)
        drafted = SampledBlocks(tokens[:, :count], candidates[:count], scores[:count])
        # The next replay overwrites them. What the drafts were drawn from is read before.
        if noise is None:
            return drafted.tokens[LIKELIEST].clone()
        return drafted._replace(tokens=drafted.tokens.clone())

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        committed: Tensor | None = None,
        prompt: PromptWrites | None = None,
    ) -> None:
        key = None
        if committed is not None and prompt is None:
            key = self._key_of_commit(len(slots))
        if key is None or committed is None:
            self._drafter.absorb(target_hidden, positions, slots, committed, prompt)
            return
        tokens = key.requests * self._drafter.verify_block
        self._buffers.set_commit(tokens, target_hidden, positions, slots, committed)
        self._graphs[key]()
        self.replays["commit"] += 1

    def _size_of_proposal(
        self, count: int, requests: RequestSlots
    ) -> tuple[int | None, int | None]:
        """Return the requests and columns of the recording to replay; None where none is as
        large."""
        if requests.req_to_token.data_ptr() != self._table.data_ptr():
            raise ValueError("req_to_token is not the table that the recordings read")
        columns = self._drafter.columns(requests)
        return _next(self._batch_buckets, count), _next(self._column_buckets, columns)

    def _key_of_commit(self, tokens: int) -> Key | None:
        """Return the key of a commit of so many tokens. A commit is per token: a narrow step takes
        the smallest recording with as many tokens, whatever its requests."""
        size = _next(self._batch_buckets, -(-tokens // self._drafter.verify_block))
        return None if size is None else Key(size)


class _Buffers:
    """The buffers that recordings read and write, for batches of up to R requests."""

    def __init__(self, drafter: Drafter, requests: int) -> None:
        weight, tokens = drafter.model.norm.weight, requests * drafter.verify_block

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weight.device)

        self.bonus, self.rows, self.seq_lens = (zeros(requests) for _ in range(3))
        self.seeds, self.temperatures = zeros(requests), zeros(requests, dtype=torch.float32)
        config, block = drafter.model.config, drafter.draft_block
        self.block_hidden = weight.new_zeros(requests, block, config.hidden_size)
        drafts = requests * (block - 1), drafter.model.head.candidates
        self.ids = zeros(len(RULES) * requests * block)
        self.candidates, self.scores = zeros(*drafts), zeros(*drafts, dtype=torch.float32)
        self.positions, self.slots = zeros(tokens), zeros(tokens)
        self.committed = zeros(tokens, dtype=torch.bool)
        self.hidden = weight.new_zeros(tokens, config.target_hidden_width)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in vars(self).values())

    def drafted(self, count: int, width: int) -> SampledBlocks:
        """Contiguous results of that shape."""
        shape, drafts = (len(RULES), count, width), (count, width - 1)
        candidates, scores = (
            buffer[: count * (width - 1)].unflatten(0, drafts)
            for buffer in (self.candidates, self.scores)
        )
        return SampledBlocks(self.ids[: math.prod(shape)].view(shape), candidates, scores)

    def clear(self) -> None:
        """Fill them with zeros, which are padding."""
        for buffer in vars(self).values():
            buffer.zero_()

    def set_proposal(
        self, bucket: int, bonus: Tensor, requests: RequestSlots, noise: BlockNoise | None
    ) -> None:
        """Write a step's inputs, and zeros for the padding: a request of length 0 reads nothing.

        Args:
            bucket: requests of the recording, at least those of the step.
        """
        inputs = [
            (self.bonus, bonus),
            (self.rows, requests.rows),
            (self.seq_lens, requests.seq_lens),
        ]
        padding = slice(len(bonus), bucket)
        # In most steps there is none.
        zeroed = [buffer[padding] for buffer, _ in inputs] if len(bonus) < bucket else []
        # One recording serves all batches: a request with temperature 0 has no noise.
        if noise is None:
            zeroed.append(self.temperatures[:bucket])
        else:
            inputs.append((self.seeds, noise.seeds))
            self.temperatures[: len(bonus)].copy_(noise.temperatures)
            zeroed += [self.temperatures[padding]] if zeroed else []
        _copy(inputs)
        if zeroed:
            torch._foreach_zero_(zeroed)

    def set_commit(
        self, bucket: int, hidden: Tensor, positions: Tensor, slots: Tensor, committed: Tensor
    ) -> None:
        """Write a commit's inputs, see `Proposer.absorb`; the padding is not committed.

        Args:
            bucket: tokens of the recording, at least those of the commit.
        """
        _copy([(self.positions, positions), (self.slots, slots)])
        self.hidden[: len(slots)].copy_(hidden[: len(slots)])
        self.committed[: len(slots)].copy_(committed)
        if len(slots) < bucket:
            self.committed[len(slots) : bucket].fill_(False)
            self.slots[len(slots) : bucket].fill_(PADDING_SLOT)


def _copy(inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values to the first rows of buffers, given in pairs, together: the launches of a step
    cost the host more than the copies."""
    buffers = [buffer[: len(values)] for buffer, values in inputs]
    torch._foreach_copy_(buffers, [values for _, values in inputs])


def _next(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of the ascending `sizes` that is not below `size`."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None
