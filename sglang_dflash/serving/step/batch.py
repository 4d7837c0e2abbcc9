"""SGLang's batch, on its way into the target and back: what a verify forward and a prefill need of
it, and what the next step is given."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
from sglang.srt.managers.schedule_batch import ScheduleBatch as ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult as GenerationBatchResult
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode as CaptureHiddenMode
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    get_server_return_hidden_states_mode,
)
from sglang.srt.runtime_context import get_spec as get_spec
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify
from sglang.srt.utils.common import ceil_align, is_pin_memory_available
from torch import Tensor

from sglang_dflash.drafting.options import asks_dflash
from sglang_dflash.patches.restored import restored
from sglang_dflash.serving.hybrid.rollback import Checkpoints


def verify_batch(
    batch: ScheduleBatch, target_worker: Any, block: Tensor, positions: Tensor, cache_locs: Tensor
) -> ForwardBatch:
    """The target's forward over the drafted blocks.

    While it is prepared, the host-side lengths of `batch` count the block in; they are put back
    even if the preparation raises.

    Args:
        block: int64 `[R, W]`.
        positions: int64 `[R, W]`.
        cache_locs: int64 `[R, W]`, the KV slots to write.
    """
    width = block.shape[1]
    batch.out_cache_loc = cache_locs.flatten()
    with restored(batch, "seq_lens_cpu", "seq_lens_sum"):
        _count_in(batch, width)
        verify_input = DFlashVerifyInput(
            draft_token=block.flatten(),
            # Gemma 4's forward adds one to them in place.
            positions=positions.flatten().clone(),
            draft_token_num=width,
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
        _count_in(batch, 1)
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


def _count_in(batch: ScheduleBatch, tokens: int) -> None:
    """Let the host-side lengths count so many tokens more per request."""
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + tokens
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    else:
        # `nxt_kv_lens_cpu` bounds the lengths after this step's block already.
        batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
        batch.seq_lens_sum = batch.spec_info.nxt_kv_lens_sum


def keep_hidden_states(
    output: Any,
    _processor: Any,
    _input_ids: Any,
    _hidden_states: Any,
    _lm_head: Any,
    metadata: Any,
    aux_hidden_states: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    """After `LogitsProcessor.forward`, which for scores at chosen positions returns no hidden
    states: add those that the drafter reads."""
    if (
        output.hidden_states is None
        and aux_hidden_states is not None
        and metadata.capture_hidden_mode.is_full()
    ):
        output.hidden_states = pack_aux_hidden_states(aux_hidden_states)


def replace_hidden_states(batch: ScheduleBatch, output: Any) -> None:
    """Drop the hidden states that the drafter has read, which the overlap loop would copy to the
    host, and keep the last layer's if a request asks for them."""
    last, output.hidden_states, output.last_hidden_states = output.last_hidden_states, None, None
    if not batch.return_hidden_states or last is None:
        return
    # SGLang counts a verify forward as an extend too.
    is_prefill = batch.forward_mode.is_extend_without_speculative()
    if is_prefill and get_server_return_hidden_states_mode().is_last():
        # SGLang then expects one row per request.
        ends = to_device(torch.tensor(batch.extend_lens).cumsum(0) - 1, last.device)
        output.hidden_states = last[ends]
    else:
        # The next replay of a captured forward may write before these are copied to the host.
        output.hidden_states = last.clone()


def host_lengths(batch: ScheduleBatch) -> Tensor:
    """Lengths on the host that bound the committed ones: SGLang's, or what is reserved if it keeps
    none there."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu
    return batch.spec_info.nxt_kv_lens_cpu


def checkpoints_due(batch: ScheduleBatch, seq_lens: Tensor, lengths: Tensor) -> Checkpoints | None:
    """Return the track boundaries that a step crosses; None if the prefix cache keeps no
    checkpoints.

    Args:
        batch: the running requests.
        seq_lens: int64 `[R]`, committed tokens before the step.
        lengths: int64 `[R]`, tokens that the step commits.
    """
    if batch.mamba_track_indices is None:
        return None
    grid = mamba_track_grid(batch.tree_cache.page_size)
    after = seq_lens + lengths
    crossed = seq_lens // grid != after // grid
    steps = torch.where(crossed, after // grid * grid - seq_lens - 1, -1)
    return Checkpoints(batch.mamba_track_indices.long(), steps)


class DraftInput(DFlashDraftInputV2):
    """The state that SGLang carries from one step to the next.

    Attributes:
        in_flight: tokens per request that the last step can have committed, until the host knows
            them.
        ends: int64 `[R]`: each request has KV slots for the positions below this one. None if there
            are enough for a whole block.
    """

    in_flight = 0
    ends: Tensor | None = None

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve slots for two blocks and a bonus token per request, unless a whole block and the
        bonus token after it fit in what earlier steps have reserved; near the end of the pool, what
        is left of it."""
        if not batch.reqs:
            return
        batch.maybe_evict_swa()
        block = get_spec().speculative_num_draft_tokens
        caches = [request.kv for request in batch.reqs]
        committed = [int(kv.kv_committed_len) for kv in caches]
        # If this step and the one in flight accept whole blocks, the host learns of it only after
        # the next step has written its bonus token.
        bounds = [length + self.in_flight + block + 1 for length in committed]
        self.ends = None
        if not _have_slots(caches, bounds):
            _reserve(batch, 2 * block + 1)
            if not _have_slots(caches, bounds):
                ends = torch.tensor([kv.kv_allocated_len for kv in caches])
                self.ends = to_device(ends, batch.device)
        for request in batch.reqs:
            request.decode_batch_idx += 1
        # Under overlap these lag behind: before the forward SGLang replaces them by the published
        # lengths, or by None (`FutureMap.resolve_seq_lens_cpu`).
        batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(committed), sum(committed)
        longest = [max(kv.kv_allocated_len, n) for kv, n in zip(caches, bounds, strict=True)]
        self.nxt_kv_lens_cpu = torch.tensor(
            longest, dtype=torch.int32, pin_memory=is_pin_memory_available(batch.device)
        )
        self.nxt_kv_lens_sum = sum(longest)

    def merge_batch(self, spec_info: DraftInput) -> None:
        super().merge_batch(spec_info)
        self.in_flight = max(self.in_flight, spec_info.in_flight)


def slots_for_next_step(batch: ScheduleBatch, requests: list[Any], page_size: int) -> int:
    """In place of `ScheduleBatch._new_tokens_required_next_decode_spec_v2`: the fewest slots that a
    step takes, in whole pages, as in plain decoding: one for each newest token, and one more if a
    step is in flight: that step accepts a draft only if the bonus token after it has a slot, so at
    most its first token lies beyond what is reserved."""
    reserve = 1 + min(1, batch.spec_info.in_flight)
    current, reserved, _ = page_aligned_decode_alloc_lens(
        requests, reserve=reserve, page_size=page_size
    )
    return _new_slots(current, reserved, page_size)


def _have_slots(caches: list[Any], bounds: list[int]) -> bool:
    return all(kv.kv_allocated_len >= n for kv, n in zip(caches, bounds, strict=True))


def _reserve(batch: ScheduleBatch, max_tokens: int) -> None:
    """Reserve `max_tokens` slots per request beyond its committed tokens. If the pool has fewer,
    each gets an equal share, and none that its answer cannot reach."""
    allocator = batch.token_to_kv_pool_allocator
    page = allocator.page_size
    current, reserved, _ = page_aligned_decode_alloc_lens(
        batch.reqs, reserve=max_tokens, page_size=page
    )
    slots = _new_slots(current, reserved, page)
    if not allocator.check_decode_capacity(num_tokens=slots, tree_cache=batch.tree_cache):
        reserve = bisect_right(
            range(1, max_tokens),
            allocator.available_size(),
            key=lambda n: _new_slots(current, _share(batch.reqs, n, page), page),
        )
        reserved = _share(batch.reqs, max(1, reserve), page)
    lengths = torch.tensor([current, reserved], dtype=torch.int32)
    on_device = to_device(lengths, batch.device)
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=on_device[0],
        cur_kv_lens_cpu=lengths[0],
        nxt_kv_lens=on_device[1],
        nxt_kv_lens_cpu=lengths[1],
        num_needed_tokens=sum(reserved) - sum(current),
        batch=batch,
    )


def _new_slots(current: list[int], reserved: list[int], page: int) -> int:
    """Slots of the pages that requests do not have yet. After a prefill, a request's last page is
    reserved in part only."""
    return sum(
        ceil_align(after, page) - ceil_align(before, page)
        for before, after in zip(current, reserved, strict=True)
    )


def _share(requests: list[Any], reserve: int, page: int) -> list[int]:
    """Slots per request if each gets `reserve` beyond its committed tokens. The last token of an
    answer needs none."""
    ends = (len(r.origin_input_ids) + r.sampling_params.max_new_tokens - 1 for r in requests)
    current, reserved, _ = page_aligned_decode_alloc_lens(requests, reserve=reserve, page_size=page)
    return [
        max(length, min(slots, ceil_align(end, page)))
        for length, slots, end in zip(current, reserved, ends, strict=True)
    ]


def draft_input(bonus_tokens: Tensor, new_seq_lens: Tensor, in_flight: int) -> DraftInput:
    """The next step's input: bonus tokens and committed lengths, both int64 `[R]`. The fields of
    other algorithms stay empty."""
    empty = bonus_tokens.new_empty((len(bonus_tokens), 0), dtype=torch.float32)
    next_input = DraftInput(
        topk_p=empty,
        topk_index=empty.long(),
        bonus_tokens=bonus_tokens.long(),
        new_seq_lens=new_seq_lens.long(),
        hidden_states=empty,
    )
    next_input.in_flight = in_flight
    return next_input


def serves_dflash() -> bool:
    """Return whether this process serves with DFLASH."""
    return asks_dflash(get_spec().speculative_algorithm)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. The copy is enqueued: the host does not wait for what the device
    still has to do, as it would for pageable memory."""
    pinned = is_pin_memory_available(device)
    return (host.pin_memory() if pinned else host).to(device, non_blocking=pinned)


def record_stream(tensor: Tensor) -> None:
    """Tell the allocator that our stream uses a tensor that overlap scheduling made on another."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream())
