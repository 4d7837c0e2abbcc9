"""Every change that serving makes to SGLang, one row each. See docs/upgrading-sglang.md.

Rows name our functions as `MODULE:NAME`, so that this table loads without torch.
"""

from __future__ import annotations

from sglang_dflash.seam.seam import Kind, Seam

_SRT = "sglang.srt."
_OURS = "sglang_dflash.serving."
_ENGINE = "tests/engine/"

SEAMS = (
    Seam(
        target=_SRT + "server_args.ServerArgs.add_cli_args",
        kind=Kind.AFTER,
        ours=_OURS + "start.flags:add_flags",
        reason="SGLang does not know our flags, nor the published commands' spelling of its own.",
        proof="tests/serving/test_seams.py::test_our_flags_are_unknown_without_the_row",
    ),
    Seam(
        target=_SRT + "server_args.ServerArgs.from_cli_args",
        kind=Kind.AFTER,
        ours=_OURS + "start.flags:keep_flags",
        reason="ServerArgs drops values of flags that are no fields of it.",
        proof="tests/serving/test_seams.py::test_our_values_are_dropped_without_the_row",
    ),
    Seam(
        target=_SRT + "entrypoints.engine.Engine.server_args_class",
        kind=Kind.ASSIGN,
        ours=_OURS + "start.flags:server_args_from_kwargs",
        reason="Engine(**kwargs) rejects our keyword arguments; it builds its arguments right "
        "after the plugins were loaded, without a command line.",
        proof="tests/serving/test_seams.py::test_engine_rejects_our_arguments_without_the_row",
        only_if_loaded=_SRT + "entrypoints.engine",
    ),
    Seam(
        target=_SRT + "arg_groups.speculative_hook.handle_speculative_decoding",
        kind=Kind.BEFORE,
        ours=_OURS + "start.choose_worker:check_pair",
        reason="A draft that does not fit fails inside a child process, minutes later.",
        proof="tests/serving/test_broken_drafts.py::"
        "test_all_refuse_a_broken_draft_with_the_same_line",
    ),
    Seam(
        target=_SRT + "utils.hf_transformers.config.get_config",
        kind=Kind.AROUND,
        ours=_OURS + "start.draft_files:get_config",
        reason="With --trust-remote-code, Python of the draft's folder runs.",
        proof="tests/serving/test_draft_code.py::test_sglang_runs_the_code_without_the_row",
    ),
    Seam(
        target=_SRT + "speculative.spec_info.SpeculativeAlgorithm.create_worker",
        kind=Kind.AROUND,
        ours=_OURS + "start.choose_worker:create_worker",
        reason="SGLang's own DFLASH worker would serve.",
        proof="tests/serving/test_seams.py::test_the_builtin_worker_serves_without_the_row",
    ),
    Seam(
        target=_SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        kind=Kind.AROUND,
        ours=_OURS + "start.memory:pool_config",
        reason="SGLang charges a draft slot per target token, whatever the draft's window.",
        proof="tests/serving/test_memory.py::test_rings_leave_the_target_more_tokens",
    ),
    Seam(
        target=_SRT + "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        kind=Kind.AROUND,
        ours=_OURS + "start.memory:table_headroom",
        reason="With pages of one token, the slots that SGLang reserves for a request near the "
        "context limit do not fit its row: on a GPU they overwrite the next request's.",
        proof="tests/serving/test_memory.py::test_a_table_row_holds_what_is_reserved",
    ),
    Seam(
        target=_SRT + "session.streaming_session.StreamingSession.try_cache_finished_req",
        kind=Kind.AFTER,
        ours=_OURS + "step.scheduler:without_last_token",
        reason="A streaming session's next turn attends to a slot that no forward has written.",
        proof="tests/serving/test_seams.py::test_a_session_counts_an_unwritten_token",
    ),
    Seam(
        target=_SRT + "managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController._add_speculative",
        kind=Kind.AFTER,
        ours=_OURS + "show.figures:add_report",
        reason="/server_info shows nothing of an out-of-tree worker.",
        proof="tests/serving/test_seams.py::test_server_info_shows_no_worker_without_the_row",
    ),
)

# Applied in the scheduler process when our worker serves.
WORKER_SEAMS = (
    Seam(
        target=_SRT + "managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_decode",
        kind=Kind.AROUND,
        ours=_OURS + "step.scheduler:count_kept_tokens",
        reason="The worker does not learn which steps and tokens of its result a request keeps.",
        proof=_ENGINE + "test_counts.py::test_all_accounts_of_the_acceptance_agree",
    ),
    Seam(
        target=_SRT + "managers.schedule_batch.ScheduleBatch"
        "._new_tokens_required_next_decode_spec_v2",
        kind=Kind.REPLACE,
        ours=_OURS + "step.batch:slots_for_next_step",
        reason="A request that plain decoding finishes ends with HTTP 500 if the pool has no room "
        "for two blocks beyond it.",
        proof="tests/serving/test_batch.py::test_sglang_asks_for_two_blocks",
    ),
    Seam(
        target=_SRT + "managers.schedule_batch.Req.update_finish_state",
        kind=Kind.AROUND,
        ours=_OURS + "step.scheduler:end_at_the_first_reason",
        reason="Of the reasons to end inside one block, a later one can win: SGLang judges the "
        "block's tokens at once, kind by kind.",
        proof="tests/serving/test_answer_ends.py::test_a_later_reason_wins_without_the_row",
    ),
    Seam(
        target=_SRT + "speculative.dflash_utils.validate_dflash_request",
        kind=Kind.AROUND,
        ours=_OURS + "step.scheduler:serve_hidden_states",
        reason="Under overlap, requests for hidden states are refused.",
        proof="tests/serving/test_seams.py::test_requests_are_refused_without_the_rows",
    ),
    Seam(
        target=_SRT + "managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._append_decode_hidden_states",
        kind=Kind.AROUND,
        ours=_OURS + "step.scheduler:without_rows_after_the_end",
        reason="Hidden states of tokens after an answer's end are returned.",
        proof="tests/serving/test_answer_ends.py::test_a_row_of_hidden_states_per_token_kept",
    ),
    Seam(
        target=_SRT + "speculative.spec_sampling_mask.validate_spec_sampling_mask_request",
        kind=Kind.AROUND,
        ours=_OURS + "step.sampling:refuse_simulated_masks",
        reason="Sampling masks of sampled requests are refused where SGLang's own worker would "
        "fall back to greedy tokens.",
        proof="tests/serving/test_seams.py::test_requests_are_refused_without_the_rows",
    ),
)

# Applied in the scheduler process when replay serves, before the state pool is sized.
REPLAY_SEAMS = (
    Seam(
        target=_SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        kind=Kind.AROUND,
        ours=_OURS + "start.memory:size_state_pool",
        reason="SGLang reserves a state per block position and request.",
        proof="tests/serving/test_replay_pool.py::test_sizing_reserves_no_snapshots",
    ),
    Seam(
        target=_SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_req_pool",
        kind=Kind.AROUND,
        ours=_OURS + "start.memory:build_state_pool",
        reason="SGLang allocates a state per block position and request.",
        proof="tests/serving/test_replay_pool.py::test_the_pool_has_no_snapshots",
    ),
    Seam(
        target=_SRT + "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        kind=Kind.AROUND,
        ours=_OURS + "hybrid.replay_pool:record_verify",
        reason="The gates' inputs of a verify forward are lost, and its window is overwritten.",
        proof="tests/serving/test_replay_pool.py::test_only_verify_forwards_are_recorded",
    ),
    Seam(
        target=_SRT + "layers.attention.linear.gdn_backend.GDNKernelDispatcher.target_verify",
        kind=Kind.AROUND,
        ours=_OURS + "hybrid.replay_pool:verify_without_snapshots",
        reason="The kernel would write snapshots to a buffer that has no memory.",
        proof="tests/serving/test_replay_pool.py::test_a_buffer_without_memory_is_not_passed_on",
    ),
    Seam(
        target=_SRT + "managers.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager._select_runners",
        kind=Kind.BEFORE,
        ours=_OURS + "hybrid.replay_pool:note_new_weights",
        reason="Replay has copies of the recurrent layers' weights, and SGLang's update does not "
        "tell a worker without a runner of its own.",
        proof="tests/serving/test_replay_pool.py::test_new_weights_are_stacked_again",
    ),
)
