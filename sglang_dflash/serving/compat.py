"""Every private or movable name of SGLang that the worker touches. When SGLang moves, this file moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.runtime_context import (
    get_model,
    get_observability,
    get_parallel,
    get_serving,
    get_spec,
    mamba_track_grid,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    check_simulate_acc_token_mode,
    sample_simulated_acc_len,
)
from torch import Tensor

from sglang_dflash.core.acceptance import Accepted, accept, accept_by_decree
from sglang_dflash.core.parallel import TensorParallel
from sglang_dflash.core.recurrent.replay import RecurrentLayers

__all__ = [
    "BaseSpecWorker",
    "CaptureHiddenMode",
    "DraftInput",
    "GenerationBatchResult",
    "LogitsProcessorOutput",
    "ScheduleBatch",
    "accept_rule",
    "adjusts_logits",
    "can_extend_backwards",
    "checkpoint_grid",
    "compute_spec_logprobs",
    "draft_input",
    "draft_kv_dtype",
    "extended_backwards",
    "grammar_mask",
    "has_penalties",
    "hold_for_this_stream",
    "metric_labels",
    "physical_state_slots",
    "plain_step_logits",
    "recurrent_kind",
    "recurrent_layers",
    "recurrent_slots",
    "repeated_sampling_info",
    "same_on_all_ranks",
    "simulated_acceptance",
    "tensor_parallel",
    "unwrap_lora_layer",
    "verify_batch",
    "verify_scratch_bytes",
    "vocabulary_shard",
]


def verify_batch(
    batch: ScheduleBatch, target_worker: Any, block: Tensor, positions: Tensor, cache_locs: Tensor
) -> ForwardBatch:
    """The target's forward over `block` int64 `[R, B]` at `positions`, writing KV to `cache_locs` (both int64 `[R, B]`).

    The engine's host-side lengths mean "with the block" while this forward is prepared, and are put back.
    """
    block_size = block.shape[1]
    batch.out_cache_loc = cache_locs.flatten()
    lengths, total = batch.seq_lens_cpu, batch.seq_lens_sum
    if lengths is not None:
        batch.seq_lens_cpu = lengths + block_size
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    else:
        # The backend plans from device lengths alone; what is reserved is the host's upper bound.
        batch.seq_lens_cpu, batch.seq_lens_sum = (
            batch.spec_info.nxt_kv_lens_cpu,
            batch.spec_info.nxt_kv_lens_sum,
        )
    verify_input = DFlashVerifyInput(
        draft_token=block.flatten(),
        positions=positions.flatten(),
        draft_token_num=block_size,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = lengths, total
    return forward_batch


def tensor_parallel() -> TensorParallel:
    """The target's tensor-parallel group, in which the drafter is sharded too."""
    group = get_parallel().tp_group

    def all_gather(x: Tensor) -> Tensor:
        return group.all_gather(x[None].contiguous(), dim=0)

    return TensorParallel(group.rank_in_group, group.world_size, group.all_reduce, all_gather)


def metric_labels() -> dict[str, Any] | None:
    """Labels of this process's series in /metrics; None where it has none: without --enable-metrics, and on all ranks but the first."""
    parallel, observed = get_parallel(), get_observability()
    if not observed.enable_metrics or parallel.tp_rank > 0:
        return None
    labels = {"model_name": get_serving().served_model_name, "tp_rank": parallel.tp_rank}
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    return {**labels, **(observed.extra_metric_labels or {})}


def vocabulary_shard(lm_head: Any) -> tuple[Tensor, int]:
    """This rank's rows `[V / size, E]` of a dense lm_head without padding, and the token id of the first."""
    shard = lm_head.shard_indices
    return lm_head.weight[: shard.num_org_elements], shard.org_vocab_start_index


def same_on_all_ranks(tokens: Tensor, sampler: Any, info: SamplingBatchInfo) -> None:
    """Where plain decoding makes sure of it (grammars, SYNC_TOKEN_IDS_ACROSS_TP): every rank goes on with the same tokens."""
    sampler._sync_token_ids_across_tp(tokens, info)


def simulated_acceptance() -> float | None:
    """Tokens per step that SGLANG_SIMULATE_ACC_LEN wants to see committed, None where it is not set."""
    length = envs.SGLANG_SIMULATE_ACC_LEN.get()
    return length if length > 0 else None


# The token that SGLang answers with in its mode "fixed".
_FILLER = 100


def accept_rule(block_size: int) -> Callable[[Tensor, Tensor], Accepted]:
    """`accept`, or SGLang's simulation of an acceptance length where its variables ask for it. Raises ValueError for an unknown mode."""
    mean, method = simulated_acceptance(), envs.SGLANG_SIMULATE_ACC_METHOD.get()
    if mean is None:
        return accept
    check_simulate_acc_token_mode()
    filler = _FILLER if envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() == "fixed" else None
    return lambda block, said: accept_by_decree(
        block, said, sample_simulated_acc_len(mean, method, block_size), filler
    )


# SGLang's pools keep slot 0 for writes that nobody reads.
UNREAD_SLOT = 0


def can_extend_backwards(batch: ScheduleBatch) -> bool:
    """Whether a prefill can take in cached tokens again: not where something else is laid out along its new tokens."""
    embeds = (batch.input_embeds, batch.replace_embeds, *(batch.multimodal_inputs or ()))
    return not (
        batch.return_logprob or batch.forward_mode.is_mixed() or any(e is not None for e in embeds)
    )


@contextmanager
def extended_backwards(batch: ScheduleBatch, counts: list[int]) -> Iterator[None]:
    """While this lasts, the prefill `batch` begins `counts` tokens earlier in each request's cached prefix.

    The target computes these tokens again from the KV of the prefix as it stands; the KV that comes out is written where nobody
    reads, so that a shared prefix does not change by a rounding.
    """
    if not any(counts):
        yield
        return
    names = (
        "input_ids",
        "out_cache_loc",
        "prefix_lens",
        "extend_lens",
        "extend_num_tokens",
        "extend_logprob_start_lens",
    )
    before = {name: getattr(batch, name) for name in names}
    ids, slots = [], []
    new = zip(
        batch.input_ids.split(batch.extend_lens),
        batch.out_cache_loc.split(batch.extend_lens),
        strict=True,
    )
    for request, prefix, count, (new_ids, new_slots) in zip(
        batch.reqs, batch.prefix_lens, counts, new, strict=True
    ):
        again = request.get_fill_ids()[prefix - count : prefix]
        ids += [new_ids.new_tensor(list(again)), new_ids]
        slots += [new_slots.new_full((count,), UNREAD_SLOT), new_slots]
    batch.input_ids, batch.out_cache_loc = torch.cat(ids), torch.cat(slots)
    batch.prefix_lens = [
        prefix - count for prefix, count in zip(batch.prefix_lens, counts, strict=True)
    ]
    batch.extend_lens = [
        length + count for length, count in zip(batch.extend_lens, counts, strict=True)
    ]
    batch.extend_logprob_start_lens = [
        start + count for start, count in zip(batch.extend_logprob_start_lens, counts, strict=True)
    ]
    batch.extend_num_tokens += sum(counts)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


class DraftInput(DFlashDraftInputV2):
    """What SGLang carries from one DFLASH step to the next, with the penalties' counts kept up as in plain decoding.

    SGLang's own one leaves them out: with it frequency, presence and repetition penalties never see an output token, and
    min_new_tokens never ends.
    """

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()
        super().prepare_for_decode(batch)


def draft_input(bonus_tokens: Tensor, new_seq_lens: Tensor) -> DraftInput:
    """The next step's input: bonus tokens and committed lengths, both int64 `[R]`; the fields of other algorithms stay empty."""
    empty = bonus_tokens.new_empty((len(bonus_tokens), 0), dtype=torch.float32)
    return DraftInput(
        topk_p=empty,
        topk_index=empty.long(),
        bonus_tokens=bonus_tokens.long(),
        new_seq_lens=new_seq_lens.long(),
        hidden_states=empty,
    )


def recurrent_kind(model_config: Any) -> str | None:
    """What the target's recurrent layers are, or None where it has none."""
    if mambaish_config(model_config) is None:
        return None
    if hybrid_gdn_config(model_config) is not None:
        return "Gated DeltaNet"
    return type(mambaish_config(model_config)).__name__


def checkpoint_grid(batch: ScheduleBatch) -> int:
    """The prefix cache keeps a recurrent state every so many tokens."""
    return mamba_track_grid(batch.tree_cache.page_size)


def recurrent_slots(model_runner: Any) -> Tensor:
    """State slots int `[R]` of the last forward's requests."""
    return model_runner.attn_backend.linear_attn_backend.forward_metadata.mamba_cache_indices


def verify_scratch_bytes(model_runner: Any) -> int:
    """What the recurrent state pool holds for verification alone: memory, not shapes, for its windows overlap."""
    cache = model_runner.req_to_token_pool.mamba_pool.mamba_cache
    kept = (cache.intermediate_ssm, *cache.intermediate_conv_window)
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()
    )


def physical_state_slots(model_runner: Any, slots: Tensor) -> Tensor:
    """A unified memory pool numbers its state slots anew; every other pool's are what they are."""
    return model_runner.attn_backend.linear_attn_backend._translate_mamba_indices(slots).long()


def recurrent_layers(layers: list[Any]) -> RecurrentLayers:
    """Weights of SGLang's GDN layers, in the order of the state pool."""
    first = layers[0]
    return RecurrentLayers(
        conv_weight=torch.stack([layer.conv_weights for layer in layers]),
        conv_bias=None if first.bias is None else torch.stack([layer.bias for layer in layers]),
        activation=first.activation,
        a_log=torch.stack([layer.A_log for layer in layers]),
        dt_bias=torch.stack([layer.dt_bias for layer in layers]),
        key_heads=first.num_k_heads,
        value_heads=first.num_v_heads,
        key_dim=first.head_k_dim,
        value_dim=first.head_v_dim,
    )


def draft_kv_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of draft K/V by SGLang's own flags (--speculative-draft-kv-cache-dtype, else --kv-cache-dtype)."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        speculative_draft_kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype,
        model=None,
        model_dtype=model_dtype,
        is_draft_worker=True,
        is_dflash=True,
        speculative_draft_attention_backend=get_spec().speculative_draft_attention_backend,
    )
    return dtype


def grammar_mask(
    batch: ScheduleBatch, block: Tensor, device: torch.device, barrier: Callable[[], None] | None
) -> Any:
    """The engine's vocabulary mask over every position of the drafted block, or None where no request has a grammar."""
    if not batch.has_grammar:
        return None
    tree = GrammarTree.from_linear_chain(block)
    return build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=device,
        barrier=barrier,
    )


def plain_step_logits(logits: Tensor, info: SamplingBatchInfo) -> None:
    """Adjust `[R, V]` logits in place as a plain decoding step does: penalties, bias, custom processors."""
    info.apply_logits_bias(logits)
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info)


def adjusts_logits(info: SamplingBatchInfo) -> bool:
    """Whether `plain_step_logits` has anything to do."""
    return (
        info.logit_bias is not None
        or info.grammar_mask is not None
        or info.has_custom_logit_processor
        or has_penalties(info)
    )


def has_penalties(info: SamplingBatchInfo) -> bool:
    """Whether any request has penalties; overlap scheduling hands them over already summed."""
    live = info.penalizer_orchestrator
    return (
        info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or (live is not None and live.is_required)
    )


def hold_for_this_stream(tensor: Tensor) -> None:
    """Overlap scheduling makes some tensors on another stream: their memory must not be reused before ours has read them."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream())


def repeated_sampling_info(info: SamplingBatchInfo, times: int) -> SamplingBatchInfo:
    """Each request's sampling parameters for `times` consecutive rows; logits adjustments are already done and left out."""
    seed = info.sampling_seed
    return replace(
        info,
        temperatures=info.temperatures.repeat_interleave(times, 0),
        top_ps=info.top_ps.repeat_interleave(times),
        top_ks=info.top_ks.repeat_interleave(times),
        min_ps=info.min_ps.repeat_interleave(times),
        sampling_seed=None if seed is None else seed.repeat_interleave(times),
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        logit_bias=None,
        sampling_mask_batch_indices=None,
    )
