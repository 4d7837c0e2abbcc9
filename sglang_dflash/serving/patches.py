"""Every change that serving makes to SGLang, one row each. See docs/upgrading-sglang.md."""

from __future__ import annotations

from sglang_dflash.patches.patch import Kind, patch_rows

PATCHES = patch_rows(
    "sglang_dflash.serving",
    # The launching process: flags, and the check of the pair.
    (Kind.AFTER, "server_args.ServerArgs.add_cli_args", "start.flags:add_flags",
     "SGLang does not know our flags, nor the published commands' spelling of its own.",
     "tests/serving/test_patches.py::test_our_flags_are_unknown_without_the_row"),
    (Kind.AFTER, "server_args.ServerArgs.from_cli_args", "start.flags:keep_flags",
     "ServerArgs drops values of flags that are no fields of it.",
     "tests/serving/test_patches.py::test_our_values_are_dropped_without_the_row"),
    (Kind.ASSIGN, "entrypoints.engine.Engine.server_args_class",
     "start.flags:server_args_from_kwargs",
     "Engine(**kwargs) rejects our keyword arguments; it builds its arguments right after the "
     "plugins were loaded, without a command line.",
     "tests/serving/test_patches.py::test_engine_rejects_our_arguments_without_the_row"),
    (Kind.BEFORE, "arg_groups.speculative_hook.handle_speculative_decoding",
     "start.check_pair:check_pair",
     "A draft that does not fit fails inside a child process, minutes later.",
     "tests/serving/start/test_broken_drafts.py"
     "::test_all_refuse_a_broken_draft_with_the_same_line"),
    (Kind.AROUND, "utils.hf_transformers.config.get_config", "start.draft_files:get_config",
     "With --trust-remote-code, Python of the draft's folder runs.",
     "tests/serving/start/test_draft_code.py::test_sglang_runs_the_code_without_the_row"),
    # Start of a scheduler process: the worker, and the sizes of the pools.
    (Kind.AROUND, "speculative.spec_info.SpeculativeAlgorithm.create_worker",
     "start.choose_worker:create_worker",
     "SGLang's own DFLASH worker would serve.",
     "tests/serving/test_patches.py::test_the_builtin_worker_serves_without_the_row"),
    (Kind.AROUND, "mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
     "start.memory:pool_config",
     "SGLang charges a draft slot per target token, whatever the draft's window.",
     "tests/serving/start/test_memory.py::test_rings_leave_the_target_more_tokens"),
    (Kind.AROUND, "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
     "start.memory:table_headroom",
     "With pages of one token, the slots that SGLang reserves for a request near the context "
     "limit do not fit its row: on a GPU they overwrite the next request's.",
     "tests/serving/start/test_memory.py::test_a_table_row_holds_what_is_reserved"),
    # While it serves.
    (Kind.AFTER, "session.streaming_session.StreamingSession.try_cache_finished_req",
     "step.scheduler:without_last_token",
     "A streaming session's next turn attends to a slot that no forward has written.",
     "tests/serving/test_patches.py::test_a_session_counts_an_unwritten_token"),
    (Kind.AFTER, "managers.scheduler_components.internal_state"
     ".SchedulerInternalStateController._add_speculative", "metrics.figures:add_report",
     "/server_info shows nothing of an out-of-tree worker.",
     "tests/serving/test_patches.py::test_server_info_shows_no_worker_without_the_row"),
    (Kind.AFTER, "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
     "step.scheduler:rate_of_answer",
     "An answer's spec_accept_rate is of whole blocks, whatever its steps have verified.",
     "tests/serving/test_patches.py::test_rates_are_of_whole_blocks_without_the_rows"),
    (Kind.AROUND, "managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
     "draft_weights.from_disk:keep_served_model",
     "After new weights for the draft, the served model has the name and folder of the draft.",
     "tests/serving/draft_weights/test_from_disk.py"
     "::test_the_draft_becomes_the_served_model_without_the_row"),
)  # fmt: skip

# Penalties that count every output token once, and seeded samples of the request alone. Our worker
# needs them; the repairs install them for every server.
SAMPLING_PATCHES = patch_rows(
    "sglang_dflash.serving.step",
    (Kind.AROUND, "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
     "penalty_counts:count_while_scheduling",
     "Under overlap, penalties miss the newest token, count the prompt's last one, and miss or "
     "double others when a prefill comes in between.",
     "tests/engine/test_penalties.py::test_answers_depend_on_the_batch_without_the_rows"),
    (Kind.BEFORE, "managers.scheduler.Scheduler._forward_isolation", "penalty_counts:count_newest",
     "Under overlap, penalties never see the newest token, which is on the device; with "
     "drafts, they see one of the tokens of a step.",
     "tests/engine/test_penalties.py::test_answers_depend_on_the_batch_without_the_rows"),
    (Kind.AFTER, "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
     "penalty_counts:count_from_the_start",
     "A retracted request's penalties forget its output; the order in which penalties are "
     "applied is that of a set.",
     "tests/serving/step/test_penalty_counts.py"
     "::test_retraction_forgets_the_output_without_the_row"),
    (Kind.AROUND, "layers.sampler.Sampler._sample_from_probs",
     "seeded_sampling:sample_by_token_id",
     "A seeded answer depends on the top-k, top-p and min-p of other requests; one with min-p, "
     "or on a GPU with top-k or top-p, ends the server.",
     "tests/serving/step/test_seeded_sampling.py::test_tokens_depend_on_neighbors_without_the_row"),
)  # fmt: skip

# Applied in the scheduler process when our worker serves.
WORKER_PATCHES = SAMPLING_PATCHES + patch_rows(
    "sglang_dflash.serving",
    # Start.
    (Kind.AFTER, "disaggregation.utils.setup_state_kv_args",
     "kv_transfer.disaggregation:add_draft_kv",
     "Draft K/V of a prompt stays on the prefill server.",
     "tests/serving/kv_transfer/test_disaggregation.py::test_the_draft_kv_is_registered"),
    (Kind.AROUND, "managers.min_free_slots_delayer.resolve_min_free_slots",
     "step.scheduler:admit_into_any_free_slot",
     "A request waits while up to 3 slots are free, and none is preempted: SGLang collects "
     "prefills, because those of its own draft are expensive.",
     "tests/serving/test_patches.py::test_free_slots_are_held_back_without_the_row"),
    # Admission of a request.
    (Kind.AROUND, "speculative.dflash_utils.validate_dflash_request",
     "step.scheduler:serve_hidden_states",
     "Under overlap, requests for hidden states are refused.",
     "tests/serving/test_patches.py::test_requests_are_refused_without_the_rows"),
    (Kind.AROUND, "speculative.spec_sampling_mask.validate_spec_sampling_mask_request",
     "step.sampling:refuse_simulated_masks",
     "Sampling masks of sampled requests are refused where SGLang's own worker would fall back to "
     "greedy tokens.",
     "tests/serving/test_patches.py::test_requests_are_refused_without_the_rows"),
    (Kind.PROPERTY, "managers.schedule_batch.Req.is_prefill_only", "step.scheduler:asks_no_token",
     "Beside any draft, a request for no token gets one token's log-probability, and scores of "
     "every position in place of those that it asks for.",
     "tests/serving/test_patches.py::test_no_request_is_for_scores_without_the_row"),
    (Kind.AFTER, "layers.logits_processor.LogitsProcessor.forward",
     "step.batch:keep_hidden_states",
     "A prompt that is scored at chosen positions has no hidden states, and so no draft K/V, also "
     "for later requests that find it in the prefix cache.",
     "tests/serving/test_patches.py::test_a_scored_prompt_has_no_hidden_states_without_the_row"),
    # Between steps: slots, K/V from and to host memory or another server, new weights.
    (Kind.REPLACE, "managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
     "step.batch:slots_for_next_step",
     "A request that plain decoding finishes ends with HTTP 500 if the pool has no room for two "
     "blocks beyond it.",
     "tests/serving/step/test_batch.py::test_sglang_asks_for_two_blocks"),
    (Kind.AFTER, "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.write",
     "kv_transfer.host_tier:backs_up",
     "Draft K/V stays behind when the target's goes to host memory.",
     "tests/serving/kv_transfer/test_host_tier.py::test_sglang_tells_the_tier"),
    (Kind.AFTER, "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.load",
     "kv_transfer.host_tier:loads",
     "A token that comes back from host memory has the draft K/V of its slot's last owner.",
     "tests/serving/kv_transfer/test_host_tier.py::test_sglang_tells_the_tier"),
    (Kind.AFTER, "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
     ".alloc_prefetch_host_buffers", "kv_transfer.host_tier:reads_storage",
     "A token that comes from storage has the draft K/V of its host slot's last owner.",
     "tests/serving/kv_transfer/test_host_tier.py::test_sglang_tells_the_tier"),
    (Kind.AFTER, "disaggregation.prefill.PrefillBootstrapQueue._process_req",
     "kv_transfer.disaggregation:send_visible",
     "Draft K/V of a whole prompt is sent, whatever a draft can see.",
     "tests/serving/kv_transfer/test_disaggregation.py::test_both_sides_name_the_same_pages"),
    (Kind.BEFORE, "disaggregation.decode.DecodePreallocQueue._send_kv_metadata",
     "kv_transfer.disaggregation:receive_visible",
     "The receiver names the pages of a whole prompt.",
     "tests/serving/kv_transfer/test_disaggregation.py::test_both_sides_name_the_same_pages"),
    (Kind.AFTER, "disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch",
     "kv_transfer.disaggregation:take_over",
     "The decode server's first step knows neither seed nor text of a request, and gets the input "
     "of SGLang's worker.",
     "tests/serving/kv_transfer/test_disaggregation.py::test_a_request_is_taken_over"),
    (Kind.AFTER, "managers.scheduler_components.weight_updater"
     ".SchedulerWeightUpdaterManager._select_runners", "draft_weights.updates:with_draft",
     "New weights for the draft are reported as a success, and ignored; replay, which has copies "
     "of the recurrent layers' weights, does not learn of the target's.",
     "tests/serving/draft_weights/test_updates.py::test_an_update_has_no_draft_without_the_row"),
    (Kind.BEFORE, "managers.scheduler.Scheduler.continue_generation",
     "step.scheduler:leave_out_pause",
     "A pause in place counts as one step: step_milliseconds and step_shares are wrong.",
     "tests/serving/metrics/test_step_times.py::test_a_pause_is_a_step_without_the_row"),
    # Results of a step, and a request's end.
    (Kind.AROUND, "managers.scheduler_components.batch_result_processor"
     ".SchedulerBatchResultProcessor.process_batch_result_decode",
     "step.scheduler:count_kept_tokens",
     "The worker does not learn which steps and tokens of its result a request keeps.",
     "tests/engine/test_counts.py::test_all_accounts_of_the_acceptance_agree"),
    (Kind.AROUND, "managers.scheduler_components.batch_result_processor"
     ".SchedulerBatchResultProcessor.process_batch_result_prefill",
     "step.scheduler:count_mixed_token",
     "Of an answer that ends in a mixed step, the prefix cache without extra buffers keeps a "
     "recurrent state that is a token ahead: prompts that go on from it get other answers.",
     "tests/serving/hybrid/test_checkpoints.py::test_a_mixed_step_ends_a_token_ahead"),
    (Kind.AROUND, "managers.schedule_batch.Req.update_finish_state",
     "step.scheduler:end_at_the_first_reason",
     "Of the reasons to end inside one block, a later one can win: SGLang judges the block's "
     "tokens at once, kind by kind.",
     "tests/serving/step/test_answer_ends.py::test_a_later_reason_wins_without_the_row"),
    (Kind.BEFORE, "session.session_controller.Session._concat_token_arrays",
     "step.scheduler:cut_last_turn",
     "The next turn of a session reads tokens that follow the end of the last one.",
     "tests/serving/step/test_answer_ends.py"
     "::test_the_next_turn_reads_on_after_the_end_without_the_row"),
    (Kind.AROUND, "managers.scheduler_components.batch_result_processor"
     ".SchedulerBatchResultProcessor._append_decode_hidden_states",
     "step.scheduler:without_rows_after_the_end",
     "Hidden states of tokens after an answer's end are returned.",
     "tests/serving/step/test_answer_ends.py::test_a_row_of_hidden_states_per_token_kept"),
    (Kind.AROUND, "managers.scheduler_components.metrics_reporter"
     ".SchedulerMetricsReporter.report_decode_stats", "step.scheduler:rate_of_proposed",
     "The accept rate of the log and of /metrics is of whole blocks, too.",
     "tests/serving/test_patches.py::test_rates_are_of_whole_blocks_without_the_rows"),
)  # fmt: skip

# Applied in the scheduler process when SGLang's own worker serves.
BUILTIN_PATCHES = patch_rows(
    "sglang_dflash.serving",
    (Kind.AROUND, "models.dflash.DFlashDraftModel.load_weights",
     "draft_weights.builtin_worker:load_weights",
     "Tensors of a draft that no parameter takes, and parameters that no tensor fills, are passed "
     "over in silence, as the packed fc of a W4A16 draft.",
     "tests/serving/draft_weights/test_builtin_worker.py::test_weights_are_lost_without_the_row"),
)  # fmt: skip

# Applied in the scheduler process when replay serves, before the state pool is sized.
REPLAY_PATCHES = patch_rows(
    "sglang_dflash.serving",
    (Kind.AROUND, "mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
     "start.memory:size_state_pool",
     "SGLang reserves a state per block position and request, and gives half of the rest to states "
     "that no request needs.",
     "tests/serving/hybrid/test_replay_pool.py::test_sizing_reserves_no_snapshots"),
    (Kind.AROUND, "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_req_pool",
     "start.memory:build_state_pool",
     "SGLang allocates a state per block position and request.",
     "tests/serving/hybrid/test_replay_pool.py::test_the_pool_has_no_snapshots"),
    (Kind.AROUND, "mem_cache.kv_cache_configurator.KVCacheConfigurator"
     "._build_hybrid_mamba_decode_req_pool", "start.memory:build_state_pool",
     "A decode server, too, allocates a state per block position and request.",
     "tests/serving/hybrid/test_replay_pool.py::test_the_pool_has_no_snapshots"),
    (Kind.AROUND, "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
     "hybrid.replay_pool:record_verify",
     "The gates' inputs of a verify forward are lost, and its window is overwritten.",
     "tests/serving/hybrid/test_replay_pool.py::test_only_verify_forwards_are_recorded"),
    (Kind.AROUND, "layers.attention.linear.gdn_backend.GDNKernelDispatcher.target_verify",
     "hybrid.replay_pool:verify_without_snapshots",
     "The kernel would write snapshots to a buffer that has no memory.",
     "tests/serving/hybrid/test_replay_pool.py::test_a_buffer_without_memory_is_not_passed_on"),
)  # fmt: skip
