"""Bytes, from configs: of weights, K/V, recurrent states and draft steps. No torch here.

`sglang-dflash inspect` and a server's memory plan read the same functions. An `itemsize` is the
bytes of one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.target_config import (
    RecurrentShape,
    TargetGeometry,
    kv_heads_of_rank,
    share_of_rank,
)
from sglang_dflash.facts.tensors import expected_tensors

# itemsize of the dtypes of K/V. Weights, and states of a convolution, are bfloat16 where no server
# tells otherwise; recurrent states are float32.
KV_DTYPES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_BF16, _FP32 = KV_DTYPES["bfloat16"], KV_DTYPES["float32"]

# Of a ring, per entry: whose it is, and whether it is in use; and per target token: which entry it
# has.
BYTES_PER_ENTRY, BYTES_PER_TARGET_SLOT = 5, 4

# --swa-full-tokens-ratio, where it is not given.
SLIDING_SHARE = Fraction(8, 10)
# What SGLang leaves free for CUDA graphs, per request of the largest batch (its memory_hook.py).
GRAPH_BYTES_PER_REQUEST = 2 << 20


class GroupKV(NamedTuple):
    """Draft K/V of the layers of one reach.

    Attributes:
        token_bytes: of a token's K/V, over these layers.
        ring: entries of their ring; None if it cannot be one.
    """

    token_bytes: int
    ring: int | None

    def entries(self, kv_tokens: int) -> int | None:
        """Entries beside a target pool of that many tokens; None for one per target slot, which a
        ring that is no smaller comes to."""
        return self.ring if self.ring is not None and self.ring < kv_tokens else None


class Charge(NamedTuple):
    """Bytes of draft K/V: at once, and for each token of the target's pool."""

    once: int
    per_token: int

    def total(self, kv_tokens: int) -> int:
        return self.once + self.per_token * kv_tokens

    @classmethod
    def of(cls, groups: Iterable[GroupKV], kv_tokens: int) -> Charge:
        """What the groups take beside a pool of that many tokens."""
        once = per_token = 0
        for group in groups:
            entries = group.entries(kv_tokens)
            if entries is None:
                per_token += group.token_bytes
            else:
                once += entries * (group.token_bytes + BYTES_PER_ENTRY)
                per_token += BYTES_PER_TARGET_SLOT
        return cls(once, per_token)


def draft_kv_charge(groups: Sequence[GroupKV], fits: Callable[[Charge], int]) -> Charge:
    """What draft K/V takes beside the largest pool of the target that fits.

    Args:
        fits: the pool's tokens if that much is taken.
    """
    charge = Charge.of(groups, 0)
    # A ring serves from the pool on that exceeds it.
    for ring in sorted({group.ring for group in groups if group.ring is not None}):
        larger = Charge.of(groups, ring + 1)
        if fits(larger) <= ring:
            break
        charge = larger
    return charge


class DraftMemory(NamedTuple):
    """Bytes of the drafter beside its weights and the K/V of tokens, at most.

    Attributes:
        scratch_kv: entries that attention keeps the block's own K/V in.
        slot_tables: a step's tables of entries.
        attention_workspace: of draft attention, such as parts of split requests.
        graph_buffers: what recorded steps read and write; 0 if none are recorded.
        logits: of all drafted positions of the largest batch.
        activations: of the draft network for the largest batch.
        waiting_hidden: hidden states of plain steps that the drafter has not absorbed; 0 if every
            step drafts.
        texts: the tokens of requests, in which drafts are looked up; 0 without lookup.
        narrow_widths: attention backends and CUDA graphs of the target for other widths than the
            block's; 0 on a CPU.
    """

    scratch_kv: int = 0
    slot_tables: int = 0
    attention_workspace: int = 0
    graph_buffers: int = 0
    logits: int = 0
    activations: int = 0
    waiting_hidden: int = 0
    texts: int = 0
    narrow_widths: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def after_graphs(self, recorded: bool) -> int:
        """Bytes that are not allocated yet when SGLang has captured its graphs, and recorded steps
        of ours hold theirs. What has waited is absorbed by an eager step."""
        if not recorded:
            return self.waiting_hidden + self.logits + self.activations
        return self.waiting_hidden + (self.activations if self.waiting_hidden else 0)

    def __str__(self) -> str:
        parts = {name: n for name, n in self._asdict().items() if n}
        shown = ", ".join(f"{name.replace('_', ' ')} {_mib(n)}" for name, n in parts.items())
        return f"{_mib(self.total)} MiB ({shown})"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def draft_memory(
    config: DraftConfig,
    *,
    draft_block: int,
    verify_block: int,
    requests: int,
    columns: int,
    ring_columns: int = 0,
    itemsize: int = _BF16,
    ranks: int = 1,
    paged: bool = False,
    recorded: int = 0,
    waiting_steps: int = 0,
    text_tokens: int = 0,
) -> DraftMemory:
    """What a rank's largest draft steps take, without what depends on the attention backends.

    Args:
        draft_block: B, tokens of the block that the draft fills.
        verify_block: tokens per request that a step verifies, and the drafter absorbs, at most.
        requests: R, --max-running-requests.
        columns: of a step's tables of entries.
        ring_columns: those of them whose entries may be missing.
        itemsize: of the draft's weights, and of the target's hidden states.
        ranks: of the tensor-parallel group.
        paged: whether draft attention reads K/V through a page table.
        recorded: requests of the largest recorded batch; 0 if no steps are recorded.
        waiting_steps: steps of one token per request whose hidden states wait to be absorbed, at
            most (`drafting.plain_context`); 0 if every step drafts.
        text_tokens: of a request, at most, in which drafts are looked up; 0 without lookup.
    """
    hidden = config.target_hidden_width * itemsize
    table = 4 * requests * columns
    if paged:
        # The table is copied, and of a bounded cache its live entries are sorted to the front, with
        # int64 numbers (`drafting.attention.paged`).
        table = requests * (12 * (columns - ring_columns) + 48 * ring_columns)
    vocabulary = math.ceil((config.draft_vocab_size or config.vocab_size) / ranks)
    tokens = requests * max(verify_block, waiting_steps)
    return DraftMemory(
        slot_tables=table,
        graph_buffers=recorded
        * (4 * 8 + 4 + draft_block * 2 * 8 + verify_block * (2 * 8 + 1 + hidden)),
        logits=requests * (draft_block - 1) * (vocabulary * itemsize + _candidate_bytes(config)),
        activations=tokens * _activations(draft_of_rank(config, ranks)) * itemsize,
        # And their concatenation.
        waiting_hidden=2 * waiting_steps * requests * (2 * 8 + hidden),
        # SGLang's request-to-token table has a row more.
        texts=4 * (requests + 1) * text_tokens,
    )


def _candidate_bytes(config: DraftConfig) -> int:
    """Of a drafted position: keys, values and ids of its candidates, and the projected hidden
    state, in float32."""
    of = config.selector
    return 0 if of is None else of.top_k * (8 + 4 + 8) + 4 * of.rank


def _activations(config: DraftConfig) -> int:
    """Numbers per token that are alive at once, at most: of a layer residual, input, q, k and v,
    attention's output, gate and up, and their product; of a commit features and K/V of all
    layers."""
    attention = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    of_layer = 3 * config.hidden_size + attention + 3 * config.intermediate_size
    if config.convolution is not None:
        # Its input and output, and the kernels of both, which are projected at once.
        taps, groups = config.convolution.kernel_size, config.convolution.group_size
        of_layer += 2 * config.hidden_size + 2 * taps * config.hidden_size // groups
    return max(of_layer, 3 * config.hidden_size + 2 * math.prod(config.kv_shape))


def narrow_width_bytes(
    widths: Sequence[int],
    *,
    requests: int,
    positions: int,
    attention: Collection[str],
    query_width: int,
    hidden_width: int,
    itemsize: int,
    captured: Sequence[int],
) -> int:
    """What the target's forwards of verify widths below the block size keep, at most.

    Args:
        requests: R, --max-running-requests.
        positions: of a row of the request-to-token table.
        attention: names of the target's backends that prefill and decode.
        query_width: a rank's heads times their size.
        hidden_width: features of a token that the drafter reads, F * E.
        itemsize: of a hidden state.
        captured: batch sizes with a CUDA graph; empty without graphs.
    """
    cells = requests * positions

    def tables(backend: str, width: int) -> int:
        if backend == "triton":
            # Indices (int64), a mask, and results of the 8 parts that a request has at most.
            return (9 * width + 4) * cells + 8 * 4 * requests * width * query_width
        if backend == "flashinfer":
            # A wrapper with 8 MiB per captured batch size, and 4 for eager steps.
            return 5 * width * cells + (len(captured) + 4) * (8 << 20)
        # FA3 has four page tables, others fewer.
        return 16 * cells

    # Each graph keeps its hidden states.
    hidden = hidden_width * itemsize * sum(captured)
    graphs = requests * GRAPH_BYTES_PER_REQUEST if captured else 0
    return sum(
        width * hidden + graphs + sum(tables(name, width) for name in set(attention))
        for width in widths
    )


def draft_of_rank(config: DraftConfig, ranks: int) -> DraftConfig:
    """A rank's part of a draft. Raises ConfigError if the ranks do not divide it."""
    heads, inner = (
        share_of_rank(f"draft's {name}", getattr(config, name), ranks)
        for name in ("num_attention_heads", "intermediate_size")
    )
    kv_heads = kv_heads_of_rank("draft", config.num_key_value_heads, ranks)
    return replace(
        config,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
    )


def draft_weight_bytes(config: DraftConfig) -> int:
    """Of a draft in bfloat16, without what it borrows from the target."""
    return _BF16 * sum(map(math.prod, expected_tensors(config).values()))


class HeadBytes(NamedTuple):
    """What a proposal reads beyond that of a v1 draft with the same layers.

    Attributes:
        once: weights of convolutions and of the selector's projection.
        per_request: rows of the selector's tables, one of each token before and of each candidate.
    """

    once: int
    per_request: int


def head_bytes(config: DraftConfig, draft_block: int, itemsize: int) -> HeadBytes:
    """Of a rank: each holds all of these weights.

    Args:
        draft_block: B, tokens of the block that the draft fills.
        itemsize: bytes of a weight.
    """
    of_v1 = expected_tensors(replace(config, convolution=None, selector=None))
    own = {name: shape for name, shape in expected_tensors(config).items() if name not in of_v1}
    tables = {name for name in own if name.endswith("_codebook")}
    once = sum(math.prod(own[name]) for name in own.keys() - tables)
    rows = 0 if config.selector is None else 1 + config.selector.top_k
    rank = 0 if config.selector is None else config.selector.rank
    return HeadBytes(itemsize * once, itemsize * (draft_block - 1) * rows * rank)


def target_kv_bytes(target: TargetGeometry, itemsize: int) -> int:
    """Of one token's K and V, or of its latent, over all attention layers. A pool of sliding layers
    has `SLIDING_SHARE` of the tokens of the other."""
    elements = target.latent_width or 2 * target.num_key_value_heads * target.head_dim
    layers = target.attention_layers - (1 - SLIDING_SHARE) * target.sliding_layers
    return int(layers * elements * itemsize)


def state_bytes(shape: RecurrentShape) -> int:
    """Of one request's recurrent state and convolution window, over all recurrent layers."""
    return shape.layers * (shape.state * _FP32 + shape.channels * shape.window * _BF16)


def snapshot_bytes(shape: RecurrentShape, verify_block: int) -> int:
    """Scratch of one request's rollback by snapshots: a state per block position, and convolution
    inputs."""
    conv_inputs = shape.channels * (verify_block + shape.window - 1)
    return shape.layers * (verify_block * shape.state * _FP32 + conv_inputs * _BF16)


def replay_bytes(
    shape: RecurrentShape,
    verify_block: int,
    *,
    itemsize: int = _BF16,
    gate_itemsize: int = _BF16,
) -> int:
    """Scratch of one request's rollback by replay: the block's convolution inputs and the window
    before them, and the inputs of two gates per token and value head.

    Args:
        itemsize: of the convolution's inputs.
        gate_itemsize: of the gates' inputs.
    """
    windows = shape.channels * (verify_block + shape.window - 1 + shape.window) * itemsize
    return shape.layers * (windows + 2 * verify_block * shape.value_heads * gate_itemsize)
