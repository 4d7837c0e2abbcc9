"""Every change that the plain-CPU platform makes to SGLang and torch."""

from __future__ import annotations

from sglang_dflash.patches.patch import Kind, Patch, patch_rows
from sglang_dflash.plugins.platform_cpu import host_pool, torch_ops

_HOME = "sglang_dflash.plugins.platform_cpu"
_PROOFS = "tests/plugins/platform_cpu/test_without_patches.py::"
_HOST_PROOFS = "tests/plugins/platform_cpu/test_host_pool.py::"
_NEEDS_A_GPU = (
    "SGLang launches a Triton kernel, which needs a GPU.", f"{_PROOFS}test_triton_needs_a_gpu"
)  # fmt: skip
_COPIES = "SGLang copies between host and device by kernels that a CPU build lacks."
# Triton functions: the module in `sglang.kernels.ops`, ours, and the names, which are the same.
_TRITON = (
    ("attention.triton_gdn_fused_proj", "gdn_ops.elementwise",
     ("fused_qkvzba_split_reshape_cat", "fused_qkvzba_split_reshape_cat_contiguous")),
    ("mamba.causal_conv1d_triton", "gdn_ops.conv", ("causal_conv1d_fn", "causal_conv1d_update")),
    ("attention.linear.fused_gdn_gating", "gdn_ops.delta_rule", ("fused_gdn_gating",)),
    ("attention.fla.chunk", "gdn_ops.delta_rule", ("chunk_gated_delta_rule",)),
    ("attention.fla.fused_recurrent", "gdn_ops.delta_rule",
     ("fused_recurrent_gated_delta_rule_packed_decode",)),
    ("attention.linear.fused_sigmoid_gating_recurrent", "gdn_ops.delta_rule",
     ("fused_sigmoid_gating_delta_rule_update",)),
    ("elementwise.elementwise", "gdn_ops.elementwise",
     ("fused_sigmoid_mul", "fused_gate_sigmoid_mul", "fused_gate_sigmoid_mul_add")),
    ("mamba.mamba_state_scatter_triton", "gdn_ops.states",
     ("scatter_mamba_states_after_mtp_verify", "track_mamba_states_if_needed",
      "track_mamba_states_all_layers")),
    ("attention.table_qk_norm_rope", "torch_ops", ("table_qk_norm_rope_",)),
    ("activation.softcap", "torch_ops", ("softcap_inplace_logits",)),
)  # fmt: skip
PATCHES = (
    *(
        Patch(f"sglang.kernels.ops.{theirs}.{name}", Kind.REPLACE, f"{_HOME}.{ours}:{name}",
              *_NEEDS_A_GPU)
        for theirs, ours, names in _TRITON for name in names
    ),
    Patch("sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward", Kind.REPLACE,
          f"{_HOME}.gdn_ops.elementwise:rms_norm_forward", *_NEEDS_A_GPU),
    Patch("sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
          Kind.REPLACE, f"{_HOME}.gdn_ops.elementwise:gated_norm_forward", *_NEEDS_A_GPU),
    Patch("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
          Kind.REPLACE, f"{_HOME}.torch_ops:murmur_hash32",
          "SGLang's hash of seeded sampling on a CPU is a kernel of its AMX engine.",
          f"{_PROOFS}test_seeded_sampling_needs_the_amx_engine"),
    Patch("torch.Tensor.record_stream", Kind.ASSIGN, torch_ops.record_stream,
          "SGLang's built-in DFLASH worker records a stream, which a CPU tensor refuses.",
          f"{_PROOFS}test_a_cpu_tensor_refuses_a_stream"),
    Patch("torch.Tensor.pin_memory", Kind.ASSIGN, torch_ops.pin_memory,
          "SGLang pins the track mask of hybrid models without asking whether that is possible.",
          f"{_PROOFS}test_memory_cannot_be_pinned"),
    Patch("sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES",
          Kind.ASSIGN, host_pool.RESERVE,
          "SGLang leaves 10 GiB of host memory free, which a machine without a GPU may not have.",
          f"{_HOST_PROOFS}test_ten_gib_stay_free"),
    *patch_rows(
        _HOME,
        # Start-up.
        (Kind.REPLACE, "arg_groups.platform_hook.handle_cpu_backends", "torch_ops:torch_backends",
         "SGLang selects the attention kernels of its AMX engine for every x86 CPU.",
         f"{_PROOFS}test_sglang_selects_amx_attention"),
        (Kind.AROUND, "arg_groups.model_hook.handle_model_specific_adjustments",
         "torch_ops:check_as_amx",
         "SGLang's checks of gpt-oss and Gemma 4 do not know our attention backend.",
         f"{_PROOFS}test_gpt_oss_asks_for_another_attention_backend"),
        (Kind.REPLACE, "distributed.bootstrap._bind_threads_if_cpu", "torch_ops:skip_binding",
         "SGLang binds every rank to a NUMA node and refuses to start with fewer nodes than ranks.",
         f"{_PROOFS}test_sglang_needs_a_numa_node_per_rank"),
        (Kind.REPLACE, "distributed.bootstrap._init_cpu_threads_env", "torch_ops:share_cores",
         "SGLang divides the cores among ranks with a kernel of its AMX engine, or not at all.",
         f"{_PROOFS}test_sglang_places_threads_with_an_amx_kernel"),
        (Kind.REPLACE, "model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
         "torch_ops:skip_batch_invariant_kernels",
         "SGLang's deterministic inference needs an accelerator for batch-invariant products.",
         f"{_PROOFS}test_batch_invariant_mode_needs_an_accelerator"),
        (Kind.AROUND, "mem_cache.kv_cache_configurator.KVCacheConfigurator"
         "._profile_available_bytes", "pool_size:profile_available_bytes",
         "SGLang gives the pools most of the machine's free memory, whatever the model's size.",
         f"{_PROOFS}test_the_pools_take_most_of_the_free_memory"),
        # One forward.
        (Kind.REPLACE, "mem_cache.allocation.assign_req_to_token_pool_func",
         "torch_ops:assign_req_to_token", *_NEEDS_A_GPU),
        (Kind.AROUND, "models.dflash.DFlashDraftModel.forward", "torch_ops:draft_in_own_dtype",
         "SGLang's model runner casts input embeddings to bfloat16, also for a float32 draft.",
         f"{_PROOFS}test_input_embeddings_become_bfloat16"),
        (Kind.REPLACE, "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
         "torch_ops:gather_on_cpu",
         "SGLang calls a custom operator that is registered for accelerators only.",
         f"{_PROOFS}test_all_gather_needs_an_accelerator"),
        (Kind.AROUND, "models.qwen3_next.Qwen3GatedDeltaNet.__init__", "torch_ops:create_on_host",
         "Qwen3-Next's recurrent layers have parameters on the current GPU.",
         f"{_PROOFS}test_a_norm_of_qwen3_next_is_made_on_a_gpu"),
        # Packed weights.
        (Kind.AROUND, "configs.model_config._get_and_verify_dtype", "linear:model_dtype",
         "SGLang has no dtype for 16-bit weights beside float32 activations.",
         f"{_PROOFS}test_float16_is_the_dtype_of_activations_too"),
        (Kind.AROUND, "layers.logits_processor.LogitsProcessor._compute_lm_head",
         "linear:head_logits", "SGLang multiplies with the lm_head's weight as it is stored.",
         f"{_PROOFS}test_the_lm_heads_weight_is_multiplied_as_stored"),
        (Kind.AROUND, "model_executor.model_runner_components.weight_updater.WeightUpdater"
         ".update_weights_from_ipc", "linear:update_by_ipc",
         "SGLang loads weights by IPC into parameters without restoring packed ones first.",
         f"{_PROOFS}test_weights_by_ipc_are_loaded_into_parameters"),
        # Grammars.
        (Kind.REPLACE, "constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
         "torch_ops:forbid_tokens",
         "With --enable-strict-thinking no server starts: a mask without a grammar is applied by "
         "kernels only.", f"{_PROOFS}test_a_mask_without_a_grammar_needs_a_kernel"),
        # LoRA.
        (Kind.AROUND, "lora.lora_manager.LoRAManager.__init__", "torch_ops:call_without_pinning",
         "SGLang makes tensors of LoRA layers in pinned memory, which needs an accelerator.",
         f"{_PROOFS}test_lora_layers_need_pinned_memory"),
        (Kind.AROUND, "lora.lora_manager.LoRAManager.prepare_lora_batch",
         "torch_ops:call_without_pinning",
         "SGLang makes tensors of LoRA batches in pinned memory, which needs an accelerator.",
         f"{_PROOFS}test_lora_batches_need_pinned_memory"),
        # SGLang's KV canary (--kv-canary).
        (Kind.AROUND, "utils.common.create_device_stream", "torch_ops:create_stream",
         "SGLang names the device of a stream, which torch's stand-in for a CPU does not take.",
         f"{_PROOFS}test_a_cpu_stream_takes_no_device"),
        (Kind.AROUND, "kv_canary.runner.future_tensor.FutureTensors.device_to_host",
         "torch_ops:call_without_pinning",
         "The canary's counts go to the host by way of pinned memory, which needs an accelerator.",
         f"{_PROOFS}test_the_canarys_counts_need_pinned_memory"),
        # Prefill/decode disaggregation.
        (Kind.AFTER, "disaggregation.prefill.PrefillBootstrapQueue.create_sender",
         "torch_ops:send_pages_without_event",
         "SGLang pins the page numbers that it sends, and records a CUDA event.",
         f"{_PROOFS}test_page_numbers_are_sent_with_an_event"),
        (Kind.AROUND, "disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
         ".maybe_send_cached_prefix_chunk", "torch_ops:send_prefix_without_event",
         "Under overlap SGLang records a CUDA event before it sends a cached prefix.",
         f"{_PROOFS}test_a_cached_prefix_is_sent_with_an_event"),
        # Hybrid models.
        (Kind.AFTER, "configs.model_config.ModelConfig.__init__", "torch_ops:note_model_dtype",
         "The configuration that sizes the recurrent state does not know --dtype.",
         f"{_PROOFS}test_convolution_inputs_are_kept_as_bfloat16"),
        (Kind.AROUND, "configs.mamba_utils.mamba2_state_dtype",
         "torch_ops:conv_cache_in_model_dtype",
         "SGLang keeps convolution inputs as bfloat16 and copies float32 activations into them "
         "without a cast, which fails.",
         f"{_PROOFS}test_convolution_inputs_are_kept_as_bfloat16"),
        # The hierarchical cache.
        (Kind.REPLACE, "mem_cache.pool_host.common._cuda_host_register",
         "host_pool:skip_registration",
         "SGLang registers the hierarchical cache's host memory with CUDA.",
         f"{_HOST_PROOFS}test_host_memory_is_registered_with_cuda"),
        (Kind.REPLACE, "mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
         "host_pool:load_layer", _COPIES, f"{_HOST_PROOFS}test_host_copies_need_kernels"),
        (Kind.REPLACE, "mem_cache.pool_host.mha.MHATokenToKVPoolHost.backup_from_device_all_layer",
         "host_pool:back_up", _COPIES, f"{_HOST_PROOFS}test_host_copies_need_kernels"),
        (Kind.REPLACE, "mem_cache.pool_host.mla.MLATokenToKVPoolHost.load_to_device_per_layer",
         "host_pool:load_latent_layer", _COPIES, f"{_HOST_PROOFS}test_host_copies_need_kernels"),
        (Kind.REPLACE, "mem_cache.pool_host.mla.MLATokenToKVPoolHost.backup_from_device_all_layer",
         "host_pool:back_up_latents", _COPIES, f"{_HOST_PROOFS}test_host_copies_need_kernels"),
        *((Kind.AROUND, f"mem_cache.pool_host.mamba.MambaPoolHost.{copy}", "host_pool:copy_states",
           _COPIES, f"{_HOST_PROOFS}test_host_copies_of_states_need_kernels")
          for copy in ("load_to_device_per_layer", "backup_from_device_all_layer")),
        *((Kind.AROUND, f"mem_cache.pool_host.{pool}.get_dummy_flat_data_page",
           "torch_ops:call_without_pinning",
           "A page from storage comes by way of pinned memory, which needs an accelerator: none is "
           "read.", f"{_HOST_PROOFS}test_pages_from_storage_need_pinned_memory")
          for pool in ("mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost",
                       "mamba.MambaPoolHost")),
    ),
)  # fmt: skip
