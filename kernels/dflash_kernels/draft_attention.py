"""The draft attention backend `triton`: `block_attention` behind the interface of
`sglang_dflash.drafting.attention.backend`. Letters in shapes as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_kernels.block_attention import Workspace, block_attention, choose_splits
from sglang_dflash.drafting.attention.backend import Setting
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.facts.draft_config import DraftConfig


class TritonAttention:
    """`DraftAttention` that reads the cache in place, with a workspace of fixed size."""

    def __init__(self, config: DraftConfig, setting: Setting, processors: int) -> None:
        """`processors`: multiprocessors of the GPU."""
        self._layers, self._processors = setting.layers, processors
        programs, *self._shape = workspace_shape(config, setting, processors)
        device = setting.device
        self._partial = torch.empty(programs, *self._shape, dtype=torch.float32, device=device)
        self._lse = torch.empty(programs, self._shape[0], dtype=torch.float32, device=device)
        none = torch.empty(0, 0, device=device)
        self._kv, self._table = none, ContextTable(none, none)

    def prepare(self, kv: Tensor, table: ContextTable) -> None:
        """Take the table; no K/V is copied."""
        self._kv, self._table = kv, table

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        entries, seq_lens = self._table
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = choose_splits(len(q), k.shape[2], entries.shape[1], self._processors)
        space = self._workspace(len(q), k.shape[2], splits)
        block_attention(
            out, q, k, v, self._kv[:, layer], entries, seq_lens, self._layers[layer], space
        )
        return out

    def _workspace(self, requests: int, kv_heads: int, splits: int) -> Workspace | None:
        if splits == 1:
            return None
        shape, programs = (requests, kv_heads, splits), requests * kv_heads * splits
        return Workspace(
            self._partial[:programs].view(*shape, *self._shape),
            self._lse[:programs].view(*shape, self._shape[0]),
        )


def workspace_shape(config: DraftConfig, setting: Setting, processors: int) -> tuple[int, int, int]:
    """Programs, rows of each, and head dim: of the outputs of splits, of the batch that has the
    most."""
    heads = setting.tp.shard_size("num_attention_heads", config.num_attention_heads)
    kv_heads = setting.tp.kv_heads(config.num_key_value_heads)
    programs = max(
        (
            requests * kv_heads * splits
            for requests in range(1, setting.requests + 1)
            if (splits := choose_splits(requests, kv_heads, setting.columns, processors)) > 1
        ),
        default=0,
    )
    return programs, setting.draft_block * (heads // kv_heads), config.head_dim


def make(config: DraftConfig, setting: Setting) -> TritonAttention:
    """The backend for the GPU of `setting`."""
    return TritonAttention(config, setting, _processors(setting))


def workspace_bytes(config: DraftConfig, setting: Setting) -> int:
    """Bytes of the workspace on the GPU of `setting`: outputs and sums of splits, in float32."""
    programs, rows, head_dim = workspace_shape(config, setting, _processors(setting))
    return 4 * programs * rows * (head_dim + 1)


def _processors(setting: Setting) -> int:
    return torch.cuda.get_device_properties(setting.device).multi_processor_count
