"""Bytes of draft steps: what a server reserves beside weights and K/V. No torch here.

A server and `sglang-dflash inspect` call `draft_memory`, each with `StepSizes` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dflash.checkpoint.draft_config import DraftConfig, Reach
from sglang_dflash.drafting.attention.capabilities import AttentionLoad, Capabilities
from sglang_dflash.drafting.options import MOST_PROJECTED, ResolvedOptions
from sglang_dflash.memory.sizes import GroupKVSize

# What SGLang leaves free for CUDA graphs, per request of the largest batch (its memory_hook.py).
GRAPH_BYTES_PER_REQUEST = 2 << 20


class DraftMemory(NamedTuple):
    """Bytes of the drafter beside its weights and the K/V of tokens, at most. docs/gpu.md has the
    texts (`launch/docs_tables.py`).

    Attributes:
        scratch_kv: entries that attention keeps the block's own K/V in: one for padding; with `fa3`
            and `fa4` also one per request and block position.
        context_tables: a step's tables of entries, one for each group of layers: 4 bytes per
            request and visible token; with `fa3` and `fa4` 12, or 48 where K/V may be missing, as
            in a ring.
        attention_workspace: of draft attention, for each group of layers: parts of split requests
            (`triton`), or a chunk of copied K/V, 64 MiB at most (`torch`).
        graph_buffers: what recorded steps read and write; 0 if none are recorded.
        logits: of the drafted positions of `--max-running-requests` requests.
        activations: of the draft network for such a batch.
        projection: of the 512 tokens of a prompt, or of a step, that are projected to draft K/V at
            a time.
        waiting_hidden: with adaptive width, hidden states of plain steps that the drafter has not
            absorbed; 0 if every step drafts.
        texts: with lookup, the tokens of each running request, in which drafts are looked up: 4
            bytes per position of the request-to-token table.
        narrow_widths: with adaptive width, the target's page tables, indices and masks for each
            width below the block's, its CUDA graphs (2 MiB per request, SGLang's own estimate) and
            the hidden states that each graph keeps; 0 on a CPU.
    """

    # Behind each, what allocates it. `fa3` and `fa4` copy a table, and sort the copy where K/V may
    # be missing. Not here: what replay records (`sizes.replay_bytes`, by `Recording`) is taken from
    # the pool of states, a ring's 5 bytes per entry and 4 per target token are charged with its
    # K/V, and `Staging` is in host memory.
    scratch_kv: int = 0  # DraftKVCache
    context_tables: int = 0  # in each step ops.context_table, and PagedAttention.prepare
    attention_workspace: int = 0  # TritonAttention; in each layer TorchAttention
    graph_buffers: int = 0  # GraphedDrafter
    logits: int = 0  # in each step TargetHead.logits and the draft head
    activations: int = 0  # in each step DraftModel
    projection: int = 0  # Drafter.store
    waiting_hidden: int = 0  # PendingContext
    texts: int = 0  # Lookup
    narrow_widths: int = 0  # TargetForwardByWidth

    @property
    def total(self) -> int:
        return sum(self)

    def after_graphs(self, recorded: bool) -> int:
        """Bytes that are not allocated yet when SGLang has captured its graphs, and recorded steps
        of ours hold theirs. Prompts, and what has waited, are projected eagerly."""
        eager = self.waiting_hidden + self.projection
        return eager if recorded else eager + self.logits + self.activations

    def as_report(self) -> dict[str, int]:
        """Return all parts and their sum, as /server_info and `inspect` show them."""
        return {**self._asdict(), "total": self.total}

    def __str__(self) -> str:
        parts = {name: n for name, n in self._asdict().items() if n}
        shown = ", ".join(f"{name.replace('_', ' ')} {_mib(n)}" for name, n in parts.items())
        return f"{_mib(self.total)} MiB ({shown})"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


class NarrowForwards(NamedTuple):
    """The target's forwards of verify widths below the block's.

    Attributes:
        widths: that there are; empty if every step verifies the whole block.
        attention: names of the target's backends that prefill and decode; empty on a CPU, where
            they keep nothing.
        query_width: a rank's heads times their size.
        captured: batch sizes with a CUDA graph; empty without graphs.
    """

    widths: Sequence[int] = ()
    attention: Collection[str] = ()
    query_width: int = 0
    captured: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The sizes that the memory of draft steps follows from, beside the draft's config.

    Nothing has a default: who adds a field has to say what it is for a server and for `inspect`.

    Attributes:
        options: of the drafter.
        max_running: R, --max-running-requests.
        rows, positions: of the request-to-token table.
        ranks: of the tensor-parallel group.
        itemsize: of the draft's weights, and of the target's hidden states.
        kv: a rank's draft K/V (`memory.sizes.draft_kv`).
        tagged: whether draft K/V of any token may be missing, as beside a hierarchical cache.
        attention: of the draft attention backend.
        processors: multiprocessors of the GPU.
        recorded: requests of the largest recorded batch; 0 if no steps are recorded.
        most_waiting_steps: most plain steps whose hidden states wait to be absorbed
            (`drafting.pending_context`); 0 if every step drafts.
        narrow: the target's narrower forwards.
    """

    options: ResolvedOptions
    max_running: int
    rows: int
    positions: int
    ranks: int
    itemsize: int
    kv: Sequence[GroupKVSize]
    tagged: bool
    attention: Capabilities
    processors: int
    recorded: int
    most_waiting_steps: int
    narrow: NarrowForwards


def draft_memory(config: DraftConfig, steps: StepSizes) -> DraftMemory:
    """The memory of a rank's largest draft steps, and all that is kept for them.

    Args:
        config: of the whole draft.
    """
    part, requests = config.of_rank(steps.ranks), steps.max_running
    options, itemsize, paged = steps.options, steps.itemsize, steps.attention.scratch
    block, verified = options.draft_block, options.verify_block
    hidden = config.target_hidden_width * itemsize
    reaches = [group.reach for group in config.groups(options.reach)]
    columns = [reach.tokens_read(steps.positions) for reach in reaches]
    vocabulary = math.ceil((config.draft_vocab_size or config.vocab_size) / steps.ranks)
    drafts = block * 2 * 8 + (block - 1) * config.head.candidates * (8 + 4)
    recorded = 4 * 8 + 4 + drafts + verified * (2 * 8 + 1 + hidden)
    recorded += block * config.hidden_size * itemsize
    return DraftMemory(
        scratch_kv=(1 + requests * block * paged) * sum(group.token_bytes for group in steps.kv),
        context_tables=requests
        * sum(
            count * _table_cell(paged, steps.tagged or reach.is_bounded)
            for reach, count in zip(reaches, columns, strict=True)
        ),
        attention_workspace=sum(
            steps.attention.workspace(AttentionLoad(part, block, requests, count, steps.processors))
            for count in columns
        ),
        graph_buffers=steps.recorded * recorded,
        logits=requests * (block - 1) * (vocabulary * itemsize + config.head.position_bytes),
        activations=requests * block * _layer_numbers(part) * itemsize,
        projection=MOST_PROJECTED * _projection_numbers(part, reaches) * itemsize,
        # And their concatenation.
        waiting_hidden=2 * steps.most_waiting_steps * requests * (2 * 8 + hidden),
        texts=4 * steps.rows * steps.positions * options.looks_up,
        narrow_widths=narrow_width_bytes(
            steps.narrow, requests=requests, positions=steps.positions, hidden_bytes=hidden
        ),
    )  # fmt: skip


def _table_cell(paged: bool, holes: bool) -> int:
    """Bytes of a cell of a `ContextTable`. A page table is a copy, and where entries may
    be missing the live ones are sorted to the front, with int64 numbers
    (`drafting.attention.paged`)."""
    if not paged:
        return 4
    return 48 if holes else 12


def _layer_numbers(config: DraftConfig) -> int:
    """Numbers per drafted token that are alive at once in a layer, at most: residual, input, q, k
    and v, attention's output, gate and up, and their product."""
    attention = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    of_layer = 3 * config.hidden_size + attention + 3 * config.intermediate_size
    return of_layer + config.head.activations(config)


def _projection_numbers(config: DraftConfig, reaches: Sequence[Reach]) -> int:
    """Numbers per projected token that are alive at once, at most: features, K/V of all layers, and
    hidden states, which are gathered if no layer reads the whole context."""
    gathered = config.target_hidden_width * all(reach.is_bounded for reach in reaches)
    return gathered + 3 * config.hidden_size + 2 * math.prod(config.kv_shape)


def narrow_width_bytes(
    narrow: NarrowForwards, *, requests: int, positions: int, hidden_bytes: int
) -> int:
    """Bytes that the target's forwards of verify widths below the block size keep, at most.

    Args:
        requests: R, --max-running-requests.
        positions: of a row of the request-to-token table.
        hidden_bytes: of a token's hidden states that the drafter reads.
    """
    cells = requests * positions

    def tables(backend: str, width: int) -> int:
        if backend == "triton":
            # Indices (int64), a mask, and results of the 8 parts that a request has at most.
            return (9 * width + 4) * cells + 8 * 4 * requests * width * narrow.query_width
        if backend == "flashinfer":
            # A wrapper with 8 MiB per captured batch size, and 4 for eager steps.
            return 5 * width * cells + (len(narrow.captured) + 4) * (8 << 20)
        # FA3 has four page tables, others fewer.
        return 16 * cells

    # Each graph keeps its hidden states.
    hidden = hidden_bytes * sum(narrow.captured)
    graphs = requests * GRAPH_BYTES_PER_REQUEST if narrow.captured else 0
    return sum(
        width * hidden + graphs + sum(tables(name, width) for name in set(narrow.attention))
        for width in narrow.widths
    )


def headroom(verify_block: int) -> int:
    """Positions of a row of the request-to-token table beyond the context, for pages of one
    token."""
    return max(4 + verify_block, 2 * verify_block + 1)


def default_captures(requests: int) -> tuple[int, ...]:
    """Batch sizes whose decode steps SGLang captures for so many running requests, if its flags do
    not name others (`generate_decode_cuda_graph_batch_sizes` in its cuda_graph_hook.py)."""
    sizes = (
        *range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
        *range(272, requests + 1, 16),
    )  # fmt: skip
    return (*(size for size in sizes if size < requests), requests)
