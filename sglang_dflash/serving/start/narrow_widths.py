"""Memory of the target's attention backends and CUDA graphs for verify widths below the block size.
SGLang sizes its KV pools before they exist, and knows only those of the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.runtime_context import attention_backends, get_parallel

from sglang_dflash.serving.gpu.graphs import captured_sizes, target_has_graphs
from sglang_dflash.serving.start.memory import table_positions

# What SGLang leaves free for CUDA graphs, per request of the largest batch (its memory_hook.py).
GRAPH_BYTES_PER_REQUEST = 2 << 20
# Parts into which the Triton backend splits a request at most, by default.
TRITON_SPLITS = 8
# Of each FlashInfer wrapper; there is one per captured batch size, and some for eager steps.
FLASHINFER_WORKSPACE, FLASHINFER_EAGER = 8 << 20, 4


class NarrowTarget(NamedTuple):
    """What the bytes depend on.

    Attributes:
        requests: R, --max-running-requests.
        positions: of a row of the request-to-token table.
        attention: names of the backends that prefill and decode.
        query_width: a rank's heads times their size.
        hidden_width: features of a token that the drafter reads, F * E.
        itemsize: bytes of a hidden state's number.
        captured: batch sizes with a CUDA graph; empty without graphs.
    """

    requests: int
    positions: int
    attention: frozenset[str]
    query_width: int
    hidden_width: int
    itemsize: int
    captured: tuple[int, ...]

    def tables(self, backend: str, width: int) -> int:
        """Bytes of what a backend plans a forward of that width with."""
        cells = self.requests * self.positions
        if backend == "triton":
            # Indices (int64), a mask, and partial results.
            parts = 4 * self.requests * width * self.query_width * TRITON_SPLITS
            return (9 * width + 4) * cells + parts
        if backend == "flashinfer":
            wrappers = len(self.captured) + FLASHINFER_EAGER
            return 5 * width * cells + wrappers * FLASHINFER_WORKSPACE
        # FA3 has four page tables, others fewer.
        return 16 * cells

    def outputs(self, width: int) -> int:
        """Bytes of graphs, and of the hidden states that each of them keeps."""
        kept = width * self.hidden_width * self.itemsize * sum(self.captured)
        return kept + (self.requests * GRAPH_BYTES_PER_REQUEST if self.captured else 0)

    def nbytes(self, widths: Sequence[int]) -> int:
        """Bytes of all these widths."""
        return sum(
            self.outputs(width) + sum(self.tables(name, width) for name in self.attention)
            for width in widths
        )


def narrow_width_bytes(
    widths: Sequence[int],
    device: torch.device,
    model_config: Any,
    requests: int,
    hidden_width: int,
    itemsize: int,
) -> int:
    """What `TargetForwardByWidth` will allocate, at most; 0 on a CPU.

    Args:
        widths: below the block size.
        model_config: SGLang's, of the target.
        requests, hidden_width, itemsize: see `NarrowTarget`.
    """
    if not widths or device.type == "cpu":
        return 0
    heads = model_config.get_num_attention_heads(get_parallel().attn_tp_size)
    captured = captured_sizes(requests) if target_has_graphs(device) else ()
    target = NarrowTarget(
        requests, table_positions(model_config.context_len), frozenset(attention_backends()),
        heads * model_config.head_dim, hidden_width, itemsize, captured,
    )  # fmt: skip
    return target.nbytes(widths)
