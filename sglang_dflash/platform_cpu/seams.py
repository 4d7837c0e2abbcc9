"""Every change that the plain-CPU platform makes to SGLang and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.platform_cpu import host_pool, pool_size, torch_ops
from sglang_dflash.platform_cpu.gdn_ops import conv, delta_rule, elementwise, states
from sglang_dflash.seam.seam import Kind, Seam

_PROOFS = "tests/platform_cpu/test_without_seams.py::"


def _triton(module: str, ours: Callable[..., Any], name: str | None = None) -> Seam:
    """A Triton function of `sglang.kernels.ops`, of the name of `ours` unless `name` is given."""
    return Seam(
        f"sglang.kernels.ops.{module}.{name or ours.__name__}",
        Kind.REPLACE,
        ours,
        "SGLang launches a Triton kernel, which needs a GPU.",
        f"{_PROOFS}test_triton_needs_a_gpu",
    )


_STATES = "mamba.mamba_state_scatter_triton"
GDN_SEAMS = (
    _triton(
        "attention.triton_gdn_fused_proj", elementwise.fused_qkvzba_split_reshape_cat_contiguous
    ),
    _triton("mamba.causal_conv1d_triton", conv.causal_conv1d_fn),
    _triton("mamba.causal_conv1d_triton", conv.causal_conv1d_update),
    _triton("attention.linear.fused_gdn_gating", delta_rule.fused_gdn_gating),
    _triton("attention.fla.chunk", delta_rule.chunk_gated_delta_rule),
    _triton(
        "attention.fla.fused_recurrent",
        delta_rule.fused_recurrent_gated_delta_rule_packed_decode,
    ),
    _triton(
        "attention.linear.fused_sigmoid_gating_recurrent",
        delta_rule.fused_sigmoid_gating_delta_rule_update,
    ),
    _triton("attention.fla.layernorm_gated", elementwise.rms_norm_forward, "RMSNorm.forward"),
    _triton("elementwise.elementwise", elementwise.fused_sigmoid_mul),
    _triton("elementwise.elementwise", elementwise.fused_gate_sigmoid_mul),
    _triton("elementwise.elementwise", elementwise.fused_gate_sigmoid_mul_add),
    _triton(_STATES, states.scatter_mamba_states_after_mtp_verify),
    _triton(_STATES, states.track_mamba_states_if_needed),
    _triton(_STATES, states.track_mamba_states_all_layers),
)

_HOST = "sglang.srt.mem_cache.pool_host"
_HOST_PROOFS = "tests/platform_cpu/test_host_pool.py::"
_KERNELS = "SGLang copies between host and device by kernels that a CPU build lacks."
HICACHE_SEAMS = (
    Seam(f"{_HOST}.common._cuda_host_register", Kind.REPLACE, host_pool.not_registered,
         "SGLang registers the hierarchical cache's host memory with CUDA.",
         f"{_HOST_PROOFS}test_host_memory_is_registered_with_cuda"),
    Seam(f"{_HOST}.base.HICACHE_HOST_MEMORY_RESERVE_BYTES", Kind.ASSIGN, host_pool.RESERVE,
         "SGLang leaves 10 GiB of host memory free, which a machine without a GPU may not have.",
         f"{_HOST_PROOFS}test_ten_gib_stay_free"),
    Seam(f"{_HOST}.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
         Kind.REPLACE, host_pool.load_layer, _KERNELS,
         f"{_HOST_PROOFS}test_host_copies_need_kernels"),
    Seam(f"{_HOST}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer",
         Kind.REPLACE, host_pool.back_up, _KERNELS,
         f"{_HOST_PROOFS}test_host_copies_need_kernels"),
    Seam(f"{_HOST}.mamba.MambaPoolHost.load_to_device_per_layer",
         Kind.AROUND, host_pool.load_states, _KERNELS,
         f"{_HOST_PROOFS}test_host_copies_of_states_need_kernels"),
    Seam(f"{_HOST}.mamba.MambaPoolHost.backup_from_device_all_layer",
         Kind.AROUND, host_pool.back_up_states, _KERNELS,
         f"{_HOST_PROOFS}test_host_copies_of_states_need_kernels"),
)  # fmt: skip

_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
SEAMS: tuple[Seam, ...] = (
    # Start-up.
    Seam("sglang.srt.arg_groups.platform_hook.handle_cpu_backends",
         Kind.REPLACE, torch_ops.torch_backends,
         "SGLang selects the attention kernels of its AMX engine for every x86 CPU.",
         f"{_PROOFS}test_sglang_selects_amx_attention"),
    Seam("sglang.srt.distributed.bootstrap._bind_threads_if_cpu",
         Kind.REPLACE, torch_ops.no_binding,
         "SGLang binds every rank to a NUMA node and refuses to start with fewer nodes than ranks.",
         f"{_PROOFS}test_sglang_needs_a_numa_node_per_rank"),
    Seam("sglang.srt.distributed.bootstrap._init_cpu_threads_env",
         Kind.REPLACE, torch_ops.share_cores,
         "SGLang divides the cores among ranks with a kernel of its AMX engine, or not at all.",
         f"{_PROOFS}test_sglang_places_threads_with_an_amx_kernel"),
    Seam(f"{_RUNNER}.maybe_enable_batch_invariant_mode",
         Kind.REPLACE, torch_ops.no_batch_invariant_kernels,
         "SGLang's deterministic inference needs an accelerator for batch-invariant products.",
         f"{_PROOFS}test_batch_invariant_mode_needs_an_accelerator"),
    Seam("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
         Kind.AROUND, pool_size.profile_available_bytes,
         "SGLang gives the pools most of the machine's free memory, whatever the model's size.",
         f"{_PROOFS}test_the_pools_take_most_of_the_free_memory"),
    # One forward.
    Seam("sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
         Kind.REPLACE, torch_ops.assign_req_to_token,
         "SGLang launches a Triton kernel, which needs a GPU.",
         f"{_PROOFS}test_triton_needs_a_gpu"),
    Seam("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
         Kind.REPLACE, torch_ops.murmur_hash32,
         "SGLang's hash of seeded sampling on a CPU is a kernel of its AMX engine.",
         f"{_PROOFS}test_seeded_sampling_needs_the_amx_engine"),
    _triton("attention.table_qk_norm_rope", torch_ops.table_qk_norm_rope_),
    Seam("sglang.srt.models.dflash.DFlashDraftModel.forward",
         Kind.AROUND, torch_ops.draft_in_own_dtype,
         "SGLang's model runner casts input embeddings to bfloat16, also for a float32 draft.",
         f"{_PROOFS}test_input_embeddings_become_bfloat16"),
    Seam(f"{_GROUP}.all_gather_into_tensor", Kind.REPLACE, torch_ops.gather_on_cpu,
         "SGLang calls a custom operator that is registered for accelerators only.",
         f"{_PROOFS}test_all_gather_needs_an_accelerator"),
    Seam("torch.Tensor.record_stream", Kind.ASSIGN, torch_ops.record_stream,
         "SGLang's built-in DFLASH worker records a stream, which a CPU tensor refuses.",
         f"{_PROOFS}test_a_cpu_tensor_refuses_a_stream"),
    Seam("torch.Tensor.pin_memory", Kind.ASSIGN, torch_ops.pin_memory,
         "SGLang pins the track mask of hybrid models without asking whether that is possible.",
         f"{_PROOFS}test_memory_cannot_be_pinned"),
    # LoRA.
    Seam(f"{_LORA}.__init__", Kind.AROUND, torch_ops.without_pinned_memory,
         "SGLang makes tensors of LoRA layers in pinned memory, which needs an accelerator.",
         f"{_PROOFS}test_lora_layers_need_pinned_memory"),
    Seam(f"{_LORA}.prepare_lora_batch", Kind.AROUND, torch_ops.without_pinned_memory,
         "SGLang makes tensors of LoRA batches in pinned memory, which needs an accelerator.",
         f"{_PROOFS}test_lora_batches_need_pinned_memory"),
    # SGLang's KV canary (--kv-canary).
    Seam("sglang.srt.kv_canary.pool_patcher.api.attach_canary_buffers",
         Kind.AROUND, torch_ops.attach_canary_buffers,
         "The canary looks a pool up by its class, and ours is a subclass of SGLang's.",
         f"{_PROOFS}test_the_canary_knows_no_subclass_of_a_pool"),
    Seam("sglang.srt.utils.common.create_device_stream", Kind.AROUND, torch_ops.create_stream,
         "SGLang names the device of a stream, which torch's stand-in for a CPU does not take.",
         f"{_PROOFS}test_a_cpu_stream_takes_no_device"),
    Seam("sglang.srt.kv_canary.runner.future_tensor.FutureTensors.device_to_host",
         Kind.AROUND, torch_ops.without_pinned_memory,
         "The canary's counts go to the host by way of pinned memory, which needs an accelerator.",
         f"{_PROOFS}test_the_canarys_counts_need_pinned_memory"),
    # Prefill/decode disaggregation.
    Seam("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
         Kind.AFTER, torch_ops.send_pages_without_event,
         "SGLang pins the page numbers that it sends, and records a CUDA event.",
         f"{_PROOFS}test_page_numbers_are_sent_with_an_event"),
    Seam("sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
         ".maybe_send_cached_prefix_chunk", Kind.AROUND, torch_ops.send_prefix_without_event,
         "Under overlap SGLang records a CUDA event before it sends a cached prefix.",
         f"{_PROOFS}test_a_cached_prefix_is_sent_with_an_event"),
    # Hybrid models.
    Seam("sglang.srt.configs.model_config.ModelConfig.__init__",
         Kind.AFTER, torch_ops.note_model_dtype,
         "The configuration that sizes the recurrent state does not know --dtype.",
         f"{_PROOFS}test_convolution_inputs_are_kept_as_bfloat16"),
    Seam("sglang.srt.configs.mamba_utils.mamba2_state_dtype",
         Kind.AROUND, torch_ops.conv_cache_in_model_dtype,
         "SGLang keeps convolution inputs as bfloat16 and copies float32 activations into them "
         "without a cast, which fails.",
         f"{_PROOFS}test_convolution_inputs_are_kept_as_bfloat16"),
    *GDN_SEAMS,
    *HICACHE_SEAMS,
)  # fmt: skip
