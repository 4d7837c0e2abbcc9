"""The target's forward of a step; of a decode step, at the step's width."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.log import Log
from sglang_dflash.patches.restored import restored
from sglang_dflash.serving.step.batch import (
    CaptureHiddenMode,
    GenerationBatchResult,
    ScheduleBatch,
    decode_batch,
    get_spec,
    verify_batch,
)

logger = Log(__name__)

# SGLang's attention backends that make them as long as `max_context_len`.
_WITH_INDEX_BUFFERS = (
    "FlashAttentionBackend",
    "FlashInferAttnBackend",
    "FlashInferMLAAttnBackend",
    "TRTLLMHAAttnBackend",
    "TRTLLMMLABackend",
    "TritonAttnBackend",
)


class TargetForward:
    """One attention backend for all widths, which plans each forward anew: a CPU's, and any if
    every step verifies a whole block. Width 1 is SGLang's plain decoding."""

    def __init__(self, target_worker: Any) -> None:
        self._worker = target_worker

    def prefill(self, batch: ScheduleBatch, pp_proxy_tensors: Any) -> GenerationBatchResult:
        """The forward of a prefill. It samples the first tokens."""
        return self._worker.forward_batch_generation(
            batch, pp_proxy_tensors=pp_proxy_tensors, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def is_plain_decoding(self, width: int) -> bool:
        """Return whether a step of that width is SGLang's decode forward, which advances recurrent
        states itself; a verify forward leaves them to `Rollback`."""
        return width == 1

    def at(self, width: int) -> AbstractContextManager[None]:
        """Give SGLang's runner the backend and graphs of that width for one step: while it is
        prepared, runs, and moves recurrent states on."""
        return nullcontext()

    def __call__(
        self, batch: ScheduleBatch, block: Tensor, positions: Tensor, slots: Tensor
    ) -> GenerationBatchResult:
        """Run the target over the blocks.

        Args:
            block, positions, slots: int64 `[R, W]`; the slots are KV slots to write.
        """
        if self.is_plain_decoding(block.shape[1]):
            bonus = decode_batch(batch, self._worker, block.flatten(), slots.flatten())
            return self._worker.forward_batch_generation(
                batch=None, forward_batch=bonus, is_verify=True
            )
        return self._worker.forward_batch_generation(
            batch=None,
            forward_batch=verify_batch(batch, self._worker, block, positions, slots),
            is_verify=True,
            skip_attn_backend_init=True,
        )


class TargetForwardByWidth(TargetForward):
    """An attention backend and captured graphs for each width.

    A captured graph has one width, and so have FA3's plans. Width 1 verifies the bonus token, as
    SGLang's own adaptive speculation does: a decode batch would replay the graph of a block.
    """

    def __init__(self, target_worker: Any, widths: Sequence[int]) -> None:
        """To be called after SGLang has captured the graphs of the whole block.

        Args:
            widths: ascending, the last is the whole block.
        """
        super().__init__(target_worker)
        self._runner, self._verify_block = target_worker.model_runner, widths[-1]
        # Graphs share their memory: the largest come first.
        self._widths = widths[-2::-1]
        self._make()

    def _make(self) -> None:
        # The memory of those before is needed for these. If they cannot be made, there are none,
        # and the next step tries again.
        self._narrow: dict[int, tuple[Any, Any]] = {}
        self._narrow = {
            width: _make_at(width, self._runner, self._verify_block) for width in self._widths
        }
        # Not kept alive: SGLang frees them before it captures others.
        graphs = self._runner.decode_cuda_graph_runner
        self._block_graphs: Any = (lambda: None) if graphs is None else weakref.ref(graphs)

    def is_plain_decoding(self, width: int) -> bool:
        return False

    @contextmanager
    def at(self, width: int) -> Iterator[None]:
        if self._runner.decode_cuda_graph_runner is not self._block_graphs():
            # Captured again: the target has new weights, whose memory may be elsewhere.
            self._make()
        runner = self._runner
        with restored(runner, "attn_backend", "decode_cuda_graph_runner"):
            if width != self._verify_block:
                # A width without an entry must not run with the block's backend.
                narrow = self._narrow[width]
                runner.attn_backend, runner.decode_cuda_graph_runner = narrow
            yield


def target_forward(
    target_worker: Any, widths: Sequence[int], device: torch.device
) -> TargetForward:
    """The one for these widths, of which the last is the whole block."""
    if device.type == "cpu" or len(widths) == 1:
        return TargetForward(target_worker)
    return TargetForwardByWidth(target_worker, widths)


def _make_at(width: int, runner: Any, verify_block: int) -> tuple[Any, Any]:
    """The attention backend of that width, and its CUDA graphs, None without any. Made as by SGLang
    for its own adaptive speculation (eagle_worker_v2.py)."""
    began, graphs = time.perf_counter(), runner.decode_cuda_graph_runner
    # Backends and graphs read the width while they are made.
    with get_spec().override(speculative_num_draft_tokens=width):
        attention = runner._get_attention_backend()
        attention.prefill_attention_backend_str = runner.prefill_attention_backend_str
        attention.decode_attention_backend_str = runner.decode_attention_backend_str
        runner.kv_index_translator.bind_and_verify_backends([attention])
        extend_index_buffers(attention, verify_block)
        if graphs is not None:
            graphs = type(graphs)(
                runner, attn_backend=attention, speculative_num_draft_tokens=width
            )
    logger.info(
        "target at width %d: %s, %s, in %.1f s",
        width,
        type(attention).__name__,
        "no CUDA graphs" if graphs is None else f"{len(graphs.capture_bs)} CUDA graphs",
        time.perf_counter() - began,
    )
    return attention, graphs


def extend_index_buffers(attention: Any, verify_block: int) -> None:
    """Let the index buffers and page tables of captured graphs take requests that are up to two
    blocks longer than the context. To be called before there are any.

    A step near the context limit ends beyond it. SGLang's page tables end with the context: FA3
    takes what lies behind a row for slots, and behind the last row of all that is anything. Index
    buffers of width 1 have no slack either.
    """
    inner = ("full_attn_backend", "prefill_backend", "decode_backend")
    for name in inner:
        if hasattr(attention, name):
            extend_index_buffers(getattr(attention, name), verify_block)
    if type(attention).__name__ in _WITH_INDEX_BUFFERS:
        attention.max_context_len += 2 * verify_block
        if hasattr(attention, "max_num_pages"):
            attention.max_num_pages = -(-attention.max_context_len // attention.page_size)
