"""Draft attention backends as data: what each can serve, and the memory that it takes. No torch.

`sglang-dflash inspect` and servers read the same table; what a server makes of a row is in
`serving/gpu/backends.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError

# Memory that a layer's attention takes in torch beside its inputs and output.
CHUNK_BYTES = 1 << 26
# Columns that a program of the Triton kernel reads, at most.
LONGEST_SPLIT = 1 << 15


class AttentionLoad(NamedTuple):
    """The largest step of a group of draft layers, on one rank.

    Attributes:
        config: the rank's part of the draft.
        draft_block: B, tokens of a draft block.
        requests: R.
        columns: C, of the widest table.
        processors: multiprocessors of the GPU.
    """

    config: DraftConfig
    draft_block: int
    requests: int
    columns: int
    processors: int


def bytes_of_a_column(kv_heads: int, head_dim: int, rows: int, itemsize: int = 4) -> int:
    """Bytes of a column of a chunk: K and V as stored, in numbers of `itemsize` bytes, and in
    float32; scores of `rows` query heads of the block, or a mask; row numbers."""
    return 2 * kv_heads * head_dim * (itemsize + 4) + 8 * rows + 24


def chunk_bytes(load: AttentionLoad) -> int:
    """Bytes of a chunk of torch's attention, or of the widest table of the largest batch."""
    part = load.config
    rows = load.draft_block * part.num_attention_heads
    each = bytes_of_a_column(part.num_key_value_heads, part.head_dim, rows)
    return min(CHUNK_BYTES, load.requests * (load.columns + load.draft_block) * each)


class Splits(NamedTuple):
    """Programs of the Triton kernel that share a request's context.

    Attributes:
        each: of every request, however short.
        most: of the longest one: no program reads more than `LONGEST_SPLIT` columns.
    """

    each: int
    most: int


def choose_splits(requests: int, kv_heads: int, columns: int, processors: int) -> Splits:
    """Splits that give every multiprocessor a program, if the columns suffice, and let no short
    request wait long for a long one. No requests count as one."""
    most, wanted = -(-columns // 256), -(-processors // (max(requests, 1) * kv_heads))
    each = max(1, min(most, wanted))
    return Splits(each, max(each, -(-columns // LONGEST_SPLIT)))


def split_shape(load: AttentionLoad) -> tuple[int, int, int]:
    """Programs, rows of each, and head dim: of the outputs of splits, of the batch that has the
    most."""
    part, kv_heads = load.config, load.config.num_key_value_heads
    programs = max(
        (
            requests * kv_heads * splits.most
            for requests in range(1, load.requests + 1)
            if (splits := choose_splits(requests, kv_heads, load.columns, load.processors)).most > 1
        ),
        default=0,
    )
    return programs, load.draft_block * (part.num_attention_heads // kv_heads), part.head_dim


def split_bytes(load: AttentionLoad) -> int:
    """Bytes of the Triton kernel's workspace: outputs and sums of splits, in float32."""
    programs, rows, head_dim = split_shape(load)
    return 4 * programs * rows * (head_dim + 1)


@dataclass(frozen=True)
class Capabilities:
    """The drafts that a backend can serve, and its needs. None: no limit.

    Attributes:
        devices: torch device types.
        head_dims: head dims.
        capturable: whether `prepare` and `attend` can be captured in a CUDA graph.
        scratch: whether it needs an entry of the cache for every block position.
        kv_dtypes: of the draft KV cache, as torch names them.
        workspace: bytes that it takes beside the cache for a group of layers, at most.
    """

    devices: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    capturable: bool = False
    scratch: bool = False
    kv_dtypes: frozenset[str] | None = None
    workspace: Callable[[AttentionLoad], int] = lambda _load: 0

    def obstacle(self, config: DraftConfig, device: str, kv_dtype: str | None = None) -> str | None:
        """The first reason why this draft cannot be served on that device, or None.

        Args:
            device: a torch device type.
            kv_dtype: of the draft KV cache; None if it is not known.
        """
        if self.devices is not None and device not in self.devices:
            return f"runs on {', '.join(sorted(self.devices))}, not on {device}"
        if self.head_dims is not None and config.head_dim not in self.head_dims:
            served = ", ".join(map(str, sorted(self.head_dims)))
            return f"serves head dim {served}, the draft's is {config.head_dim}"
        if kv_dtype is not None and self.kv_dtypes is not None and kv_dtype not in self.kv_dtypes:
            served = ", ".join(sorted(self.kv_dtypes))
            return f"serves draft K/V in {served}, not in {kv_dtype}"
        return None


_CUDA = frozenset({"cuda"})
TRITON_HEAD_DIMS = frozenset({16, 32, 64, 128, 256})
# dtypes of draft K/V for kernels whose queries and keys share a tensor core's dtype.
_HALF = frozenset({"bfloat16", "float16"})
# The preferred ones first.
CAPABILITIES: Mapping[str, Capabilities] = {
    "triton": Capabilities(_CUDA, TRITON_HEAD_DIMS, capturable=True, workspace=split_bytes),
    "torch": Capabilities(workspace=chunk_bytes),
    "fa3": Capabilities(
        _CUDA, frozenset({64, 128, 256}), capturable=True, scratch=True, kv_dtypes=_HALF
    ),
    "fa4": Capabilities(
        _CUDA, frozenset({64, 128}), capturable=True, scratch=True, kv_dtypes=_HALF
    ),
}  # fmt: skip


def choose_attention(
    name: str | None, config: DraftConfig, device: str, kv_dtype: str | None = None
) -> str:
    """The name of the backend for a draft.

    Args:
        name: the one asked for; None for the first of `CAPABILITIES` that can serve this draft.
        device: a torch device type.
        kv_dtype: of the draft KV cache, as torch names it; None if it is not known.

    Raises:
        ConfigError: the name is unknown, or the backend cannot serve this draft on this device; the
            message lists those that can.
    """
    obstacles = {key: row.obstacle(config, device, kv_dtype) for key, row in CAPABILITIES.items()}
    able = [key for key, obstacle in obstacles.items() if obstacle is None]
    if name is None:
        return able[0]
    obstacle = obstacles.get(name, "unknown")
    if obstacle is not None:
        raise ConfigError("attention", name, f"{obstacle}; choose one of {able}")
    return name
