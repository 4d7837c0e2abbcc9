"""SGLang's batch, on its way into the target and back: what a verify forward and a prefill need of
it, and what the next step is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch as ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult as GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode as CaptureHiddenMode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_spec, mamba_track_grid
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify
from sglang.srt.utils.common import is_pin_memory_available
from torch import Tensor

from sglang_dflash.serving.hybrid.rollback import Checkpoints


@contextmanager
def restored(batch: ScheduleBatch, *names: str) -> Iterator[None]:
    """Put these fields of the batch back at the end, whatever happens in between."""
    before = {name: getattr(batch, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


def verify_batch(
    batch: ScheduleBatch, target_worker: Any, block: Tensor, positions: Tensor, cache_locs: Tensor
) -> ForwardBatch:
    """The target's forward over the drafted blocks.

    While it is prepared, the host-side lengths of `batch` count the block in; they are put back
    even if the preparation raises.

    Args:
        block: int64 `[R, B]`.
        positions: int64 `[R, B]`.
        cache_locs: int64 `[R, B]`, the KV slots to write.
    """
    block_size = block.shape[1]
    batch.out_cache_loc = cache_locs.flatten()
    with restored(batch, "seq_lens_cpu", "seq_lens_sum"):
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + block_size
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:
            # The backend plans from device lengths; the host knows what is reserved.
            batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
            batch.seq_lens_sum = batch.spec_info.nxt_kv_lens_sum
        verify_input = DFlashVerifyInput(
            draft_token=block.flatten(),
            positions=positions.flatten(),
            draft_token_num=block_size,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    return forward_batch


def decode_batch(
    batch: ScheduleBatch, target_worker: Any, bonus: Tensor, cache_locs: Tensor
) -> ForwardBatch:
    """The target's forward over the bonus tokens only: a step of plain decoding.

    Args:
        bonus: int64 `[R]`.
        cache_locs: int64 `[R]`, the KV slots to write.
    """
    batch.input_ids, batch.out_cache_loc = bonus, cache_locs
    with restored(
        batch, "seq_lens", "seq_lens_cpu", "seq_lens_sum", "spec_info", "mamba_track_mask"
    ):
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:
            batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
            batch.seq_lens_sum = batch.spec_info.nxt_kv_lens_sum
        batch.seq_lens = batch.seq_lens + 1
        # Its attention follows the draft input if there is one.
        batch.spec_info = None
        # SGLang names the checkpoints of recurrent states in verify forwards only.
        prepare_mamba_track_for_verify(batch)
        if batch.mamba_track_indices is not None:
            grid = mamba_track_grid(batch.tree_cache.page_size)
            batch.mamba_track_mask = batch.seq_lens % grid == 0
        return ForwardBatch.init_new(
            batch,
            target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )


def host_lengths(batch: ScheduleBatch) -> Tensor:
    """Upper bounds on the committed lengths that the host knows without reading the device."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu
    return batch.spec_info.nxt_kv_lens_cpu


def checkpoints_due(batch: ScheduleBatch, seq_lens: Tensor, lengths: Tensor) -> Checkpoints | None:
    """Which track boundaries a step crosses; None if the prefix cache keeps no checkpoints.

    Args:
        batch: the running requests.
        seq_lens: int64 `[R]`, committed tokens before the step.
        lengths: int64 `[R]`, tokens that it commits.
    """
    if batch.mamba_track_indices is None:
        return None
    grid = mamba_track_grid(batch.tree_cache.page_size)
    after = seq_lens + lengths
    crossed = seq_lens // grid != after // grid
    steps = torch.where(crossed, after // grid * grid - seq_lens - 1, -1)
    return Checkpoints(batch.mamba_track_indices.long(), steps)


class DraftInput(DFlashDraftInputV2):
    """What SGLang carries from one step to the next.

    Attributes:
        newest: tokens per request that the last step can have committed. Under overlap the host
            does not know them yet.
    """

    newest = 0

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        if self._has_slots(batch):
            self._prepare_reserved(batch)
        else:
            super().prepare_for_decode(batch)

    def _has_slots(self, batch: ScheduleBatch) -> bool:
        """Whether a whole block fits in what earlier steps have reserved.

        Each reservation is of two blocks, rounded up to pages, and a step without drafts takes one
        slot. Under overlap the lengths that the host knows are one step old.
        """
        needed = get_spec().speculative_num_draft_tokens + self.newest * batch.enable_overlap
        caches = [request.kv for request in batch.reqs]
        enough = [kv.kv_allocated_len - kv.kv_committed_len >= needed for kv in caches]
        return bool(enough) and all(enough)

    def _prepare_reserved(self, batch: ScheduleBatch) -> None:
        """What SGLang's own method does besides reserving slots."""
        batch.maybe_evict_swa()
        committed = [int(request.kv.kv_committed_len) for request in batch.reqs]
        allocated = [int(request.kv.kv_allocated_len) for request in batch.reqs]
        top_ks = [int(request.sampling_params.top_k) for request in batch.reqs]
        for request in batch.reqs:
            request.decode_batch_idx += 1
        self.max_top_k = max(1, *top_ks)
        self.uniform_top_k_value = top_ks[0] if len(set(top_ks)) == 1 else None
        batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(committed), sum(committed)
        self.nxt_kv_lens_cpu = torch.tensor(
            allocated, dtype=torch.int32, pin_memory=is_pin_memory_available(batch.device)
        )
        self.nxt_kv_lens_sum = sum(allocated)

    def merge_batch(self, spec_info: DraftInput) -> None:
        super().merge_batch(spec_info)
        self.newest = max(self.newest, spec_info.newest)


def draft_input(bonus_tokens: Tensor, new_seq_lens: Tensor, width: int) -> DraftInput:
    """The next step's input: bonus tokens and committed lengths, both int64 `[R]`, of a step of
    that width. The fields of other algorithms stay empty."""
    empty = bonus_tokens.new_empty((len(bonus_tokens), 0), dtype=torch.float32)
    made = DraftInput(
        topk_p=empty,
        topk_index=empty.long(),
        bonus_tokens=bonus_tokens.long(),
        new_seq_lens=new_seq_lens.long(),
        hidden_states=empty,
    )
    made.newest = width
    return made


def at_width(width: int) -> AbstractContextManager[Any]:
    """While this is open, attention backends and graphs that SGLang makes verify that many tokens
    per request."""
    return get_spec().override(speculative_num_draft_tokens=width)


def serves_dflash() -> bool:
    """Whether this process serves with DFLASH."""
    return (get_spec().speculative_algorithm or "").upper() == "DFLASH"


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. The copy is enqueued: the host does not wait for what the device
    still has to do, as it would for pageable memory."""
    pinned = is_pin_memory_available(device)
    return (host.pin_memory() if pinned else host).to(device, non_blocking=pinned)


def record_stream(tensor: Tensor) -> None:
    """Tell the allocator that our stream uses a tensor that overlap scheduling made on another."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream())
