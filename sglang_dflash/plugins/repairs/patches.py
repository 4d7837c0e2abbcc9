"""Repairs of SGLang for every server, with and without DFLASH. See docs/upgrading-sglang.md."""

from __future__ import annotations

from sglang_dflash.patches.patch import Kind, Patch, patch_rows
from sglang_dflash.plugins.repairs import secrets
from sglang_dflash.serving.patches import SAMPLING_PATCHES

PATCHES = (
    # Patches that our worker needs, too.
    *SAMPLING_PATCHES,
    *patch_rows(
        "sglang_dflash.plugins.repairs",
        (Kind.AFTER, "managers.scheduler_components.logprob_result_processor"
         ".SchedulerLogprobResultProcessor.add_logprob_return_values",
         "scores:drop_output_logprobs",
         "A request for no output token gets a log-probability of one if it shares a prefill.",
         "tests/plugins/repairs/test_scores.py::test_an_output_token_is_scored_without_the_row"),
        (Kind.BEFORE, "managers.tokenizer_manager.TokenizerManager.generate_request",
         "request_guard:check_shape",
         "Lists that do not match a batch are an HTTP 500, or end the scheduler.",
         "tests/plugins/repairs/test_request_guard.py"
         "::test_shapes_raise_other_errors_without_the_row"),
        (Kind.AROUND, "managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
         "request_guard:check_and_create",
         "A request with a value that the scheduler cannot take ends the server.",
         "tests/engine/test_request_guard.py::test_the_server_ends_without_the_guard"),
        (Kind.BEFORE, "managers.scheduler.Scheduler._add_request_to_queue",
         "admission:limit_request",
         "A request that fills the KV cache is accepted, never begins, and keeps all behind it "
         "waiting.",
         "tests/plugins/repairs/test_admission.py::test_requests_wait_for_ever_without_the_row"),
        (Kind.AROUND, "managers.schedule_policy.PrefillAdder.add_one_req",
         "admission:add_request",
         "Without a prefix cache and with pages, a prompt can be answered from its first chunk.",
         "tests/plugins/repairs/test_admission.py::test_a_prompt_is_cut_short_without_the_row"),
        (Kind.AROUND, "disaggregation.decode.DecodePreallocQueue._check_if_req_exceed_kv_capacity",
         "admission:check_arrival",
         "On a decode server, a request that fills the KV cache is accepted, never begins, and "
         "keeps all behind it waiting.",
         "tests/plugins/repairs/test_admission.py::test_arrivals_wait_for_ever_without_the_row"),
        (Kind.AROUND, "sampling.watermarking.core.redact_watermark_command_line",
         "secrets:hide_in_command",
         "/server_info shows the command line with --api-key and --admin-api-key.",
         "tests/plugins/repairs/test_operators.py::test_keys_of_the_command_line_are_hidden"),
        (Kind.AROUND, "multimodal.processors.executor.MultimodalProcessorExecutor._run",
         "bad_bodies:process_media",
         "A prompt with more places for images than images is never answered.",
         "tests/plugins/repairs/test_bad_bodies.py"
         "::test_a_wait_for_images_never_ends_without_the_row"),
        (Kind.AROUND, "function_call.function_call_parser.FunctionCallParser.__init__",
         "bad_bodies:make_tool_parser",
         "/parse_function_call without the name of a parser is an HTTP 500.",
         "tests/plugins/repairs/test_bad_bodies.py::test_a_body_is_a_500_without_the_row"),
        (Kind.BEFORE, "session.session_controller.Session.create_req", "sessions:forget_turns",
         "A turn that replaces all turns of its session ends the server.",
         "tests/plugins/repairs/test_sessions.py"
         "::test_a_replacement_of_all_turns_fails_without_the_row"),
        (Kind.AROUND, "managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
         "weight_update:check_and_update",
         "Weights of another model are reported as a success, and outputs are wrong.",
         "tests/engine/test_weight_update.py::test_outputs_are_wrong_without_the_row"),
        (Kind.AROUND, "managers.schedule_batch.Req._check_str_based_finish",
         "stop_patterns:match_in_time",
         "A stop_regex can keep the scheduler busy forever.",
         "tests/plugins/repairs/test_stop_patterns.py"
         "::test_a_pattern_takes_for_ever_without_the_row"),
        *((Kind.BEFORE, f"managers.{loop}", "interrupts:leave_to_server",
           "Ctrl-C, or a SIGTERM that a supervisor sends to all processes, ends this one while "
           "requests are still answered.",
           "tests/plugins/repairs/test_interrupts.py::test_a_child_dies_without_the_rows")
          for loop in ("scheduler.Scheduler.run_event_loop",
                       "data_parallel_controller.DataParallelController.event_loop",
                       "detokenizer_manager.DetokenizerManager.event_loop")),
        (Kind.AROUND, "entrypoints.http_server._setup_and_run_http_server",
         "interrupts:watch_while_serving",
         "At Ctrl-C the log can say that a process crashed, and the status is that of SIGKILL.",
         "tests/plugins/repairs/test_interrupts.py"
         "::test_an_end_looks_like_a_crash_without_the_row"),
        *((when, target, "orphans:end_if_orphaned",
           "After SIGTERM while a server starts, a child that was importing stays forever.",
           "tests/plugins/repairs/test_orphans.py"
           "::test_a_child_outlives_the_server_without_the_rows")
          for when, target in (
              (Kind.AFTER, "utils.common.kill_itself_when_parent_died"),
              (Kind.BEFORE, "managers.detokenizer_manager.DetokenizerManager.__init__"),
              (Kind.BEFORE, "managers.data_parallel_controller.DataParallelController.__init__"))),
        (Kind.AROUND, "managers.scheduler._dispatch_event_loop_once", "containment:run_loop",
         "An exception in a step ends the server, and with it every request.",
         "tests/engine/test_containment.py::test_the_server_ends_without_the_rows"),
        (Kind.AROUND, "managers.scheduler.Scheduler.get_next_batch_to_run",
         "containment:plan_batch",
         "Requests that shared a failed step with a bad one are batched with it again.",
         "tests/plugins/repairs/test_containment.py::test_suspects_are_admitted_step_by_step"),
        (Kind.BEFORE, "managers.scheduler.Scheduler.process_batch_result",
         "containment:remember_result",
         "If a result is processed in part, a token that ends a request is overlooked, and what "
         "was collected to be sent is lost.",
         "tests/plugins/repairs/test_containment.py::test_a_result_processed_in_part_is_undone"),
        (Kind.AROUND, "managers.scheduler.Scheduler.process_input_requests",
         "containment:queue_received",
         "A request that cannot be queued ends the server.",
         "tests/plugins/repairs/test_containment.py"
         "::test_a_request_that_cannot_be_queued_is_ended"),
        (Kind.AFTER, "managers.scheduler_components.internal_state"
         ".SchedulerInternalStateController._add_topology", "containment:add_report",
         "/server_info does not show contained failures.",
         "tests/engine/test_containment.py::test_the_guilty_get_500_and_others_their_answers"),
        *((Kind.AROUND, "managers.scheduler_components.profiler_manager"
           f".SchedulerProfilerManager.{method}", f"profiles:{wrapper}",
           "A profile that cannot be made ends the server.",
           "tests/plugins/repairs/test_operators.py"
           "::test_a_profile_that_cannot_be_made_is_an_answer")
          for method, wrapper in (("_profile", "report_failure"),
                                  ("_profile_batch_predicate", "log_failure"))),
        (Kind.AROUND, "managers.tokenizer_manager.TokenizerManager.generate_request",
         "streams:adapt_events",
         "Streamed tool calls lose arguments or whole calls if an event holds several tokens.",
         "tests/plugins/repairs/test_front_ends.py::test_calls_are_lost_without_the_rows"),
        (Kind.BEFORE, "entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
         "streams:mark_chat",
         "Chat completions and /v1/messages lose tool calls if an event holds several tokens.",
         "tests/plugins/repairs/test_front_ends.py::test_calls_are_lost_without_the_rows"),
        (Kind.BEFORE, "entrypoints.openai.serving_responses.OpenAIServingResponses"
         "._generate_with_builtin_tools", "streams:mark_response",
         "/v1/responses loses tool calls if an event holds several tokens.",
         "tests/plugins/repairs/test_front_ends.py::test_calls_are_lost_without_the_rows"),
        (Kind.AFTER, "entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
         "responses:restore_budget", "/v1/responses gives two tokens less than max_output_tokens.",
         "tests/plugins/repairs/test_responses.py::test_two_tokens_are_missing_without_the_row"),
        (Kind.BEFORE, "entrypoints.anthropic.serving.AnthropicServing._convert_response",
         "messages:clear_other_arguments",
         "/v1/messages is an HTTP 500 if a tool is called with a list, a text or a number.",
         "tests/plugins/repairs/test_messages.py"
         "::test_arguments_that_are_no_object_are_a_500_without_the_row"),
        *((Kind.BEFORE, f"entrypoints.ollama.serving.OllamaServing._stream_{endpoint}_response",
           "streams:mark_ollama", "Ollama's endpoints leave out the text of the last event.",
           "tests/plugins/repairs/test_ollama.py::test_the_last_text_is_lost_without_the_rows")
          for endpoint in ("chat", "generate")),
        (Kind.AROUND, "managers.detokenizer_manager.DetokenizerManager"
         "._decode_batch_token_id_output", "sent_text:send_once",
         "Text before two events that end inside a character can be sent twice.",
         "tests/plugins/repairs/test_token_events.py::test_text_is_sent_twice_without_the_row"),
        (Kind.AROUND, "managers.tokenizer_manager.TokenizerManager._handle_abort_req",
         "sent_text:end_without_text",
         "With --incremental-streaming-output, a request that is aborted in the queue gets all of "
         "its text once more.",
         "tests/plugins/repairs/test_aborted_streams.py"
         "::test_the_whole_text_is_sent_again_without_the_row"),
        *((Kind.AROUND, f"entrypoints.openai.serving_{endpoint}._convert_to_internal_request",
           "bad_bodies:convert_request",
           "chat_template_kwargs with a name of SGLang's own arguments are an HTTP 500.",
           "tests/engine/test_http_fuzz.py::test_no_request_ends_or_breaks_the_server")
          for endpoint in ("chat.OpenAIServingChat", "completions.OpenAIServingCompletion")),
        *((Kind.BEFORE,
           f"managers.tokenizer_manager.TokenizerManager.{action}_expert_distribution_record",
           "bad_bodies:refuse_without_recorder",
           "Without --expert-distribution-recorder-mode, it ends the server.",
           "tests/plugins/repairs/test_operators.py::test_the_recorder_raises_without_the_rows")
          for action in ("start", "stop", "dump")),
        *((Kind.BEFORE, f"managers.tokenizer_manager.TokenizerManager.{action}_memory_occupation",
           "bad_bodies:refuse_without_memory_saver",
           "While a request runs, or without a release before, it ends the server.",
           "tests/plugins/repairs/test_operators.py"
           "::test_memory_that_was_not_released_without_the_rows")
          for action in ("release", "resume")),
        (Kind.BEFORE, "managers.tokenizer_manager.TokenizerManager.configure_logging",
         "bad_bodies:check_logging",
         "After a level that SGLang does not know, every request is an HTTP 500.",
         "tests/plugins/repairs/test_operators.py::test_a_level_without_the_row"),
    ),
    Patch(
        "fastapi.dependencies.utils.request_body_to_args", Kind.AROUND,
        "sglang_dflash.plugins.repairs.bad_bodies:read_body",
        "A response_format that is no object is an HTTP 500.",
        "tests/plugins/repairs/test_bad_bodies.py::test_a_body_is_a_500_without_the_row",
    ),
    Patch(
        "sglang.srt.sampling.watermarking.core.WATERMARK_SECRET_FIELD_NAMES", Kind.ASSIGN,
        secrets.FIELDS,
        "/server_info shows --api-key and --admin-api-key to whoever has one of them, and the log "
        "has both.",
        "tests/plugins/repairs/test_operators.py::test_keys_are_shown_without_the_row",
    ),
)  # fmt: skip
