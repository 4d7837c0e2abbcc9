"""Repairs of SGLang for every server, with and without DFLASH. See docs/upgrading-sglang.md.

Rows name our functions as `MODULE:NAME`, so that this table loads without torch.
"""

from __future__ import annotations

from sglang_dflash.seam.seam import Kind, Seam

_SRT = "sglang.srt."
_OURS = "sglang_dflash.repairs."
_ENGINE = "tests/engine/"

# Names of fields that SGLang redacts where it shows its arguments: its own, and the server's keys.
SECRETS = frozenset(
    {"watermark_key", "watermark_key_b", "watermark_config", "api_key", "admin_api_key"}
)
SEAMS = (
    Seam(
        target=_SRT + "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        kind=Kind.AROUND,
        ours=_OURS + "penalties:count_while_scheduling",
        reason="Under overlap, penalties miss the newest token, count the prompt's last one, and "
        "miss or double others when a prefill comes in between.",
        proof=_ENGINE + "test_penalties.py::test_answers_depend_on_the_batch_without_the_rows",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler._forward_isolation",
        kind=Kind.BEFORE,
        ours=_OURS + "penalties:count_newest",
        reason="Under overlap, penalties never see the newest token, which is on the device; with "
        "drafts, they see one of the tokens of a step.",
        proof=_ENGINE + "test_penalties.py::test_answers_depend_on_the_batch_without_the_rows",
    ),
    Seam(
        target=_SRT + "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
        kind=Kind.AFTER,
        ours=_OURS + "penalties:count_from_the_start",
        reason="A retracted request's penalties forget its output; the order in which penalties "
        "are applied is that of a set.",
        proof="tests/repairs/test_penalties.py::test_retraction_forgets_the_output_without_the_row",
    ),
    Seam(
        target=_SRT + "layers.sampler.Sampler._sample_from_probs",
        kind=Kind.AROUND,
        ours=_OURS + "seeded_sampling:sample_by_token_id",
        reason="A seeded answer depends on the top-k, top-p and min-p of other requests; one with "
        "min-p ends the server.",
        proof="tests/repairs/test_seeded_sampling.py::"
        "test_tokens_depend_on_neighbors_without_the_row",
    ),
    Seam(
        target=_SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        kind=Kind.BEFORE,
        ours=_OURS + "request_guard:check_shape",
        reason="Lists that do not match a batch are an HTTP 500, or end the scheduler.",
        proof="tests/repairs/test_request_guard.py::test_shapes_raise_other_errors_without_the_row",
    ),
    Seam(
        target=_SRT + "managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        kind=Kind.AROUND,
        ours=_OURS + "request_guard:check_and_create",
        reason="A request with a value that the scheduler cannot take ends the server.",
        proof=_ENGINE + "test_request_guard.py::test_the_server_ends_without_the_guard",
    ),
    Seam(
        target="fastapi.dependencies.utils.request_body_to_args",
        kind=Kind.AROUND,
        ours=_OURS + "bad_bodies:read",
        reason="A response_format that is no object is an HTTP 500.",
        proof="tests/repairs/test_bad_bodies.py::test_a_body_is_a_500_without_the_row",
    ),
    *(
        Seam(
            target=_SRT + f"entrypoints.openai.serving_{endpoint}._convert_to_internal_request",
            kind=Kind.AROUND,
            ours=_OURS + "bad_bodies:convert",
            reason="chat_template_kwargs with a name of SGLang's own arguments are an HTTP 500.",
            proof=_ENGINE + "test_http_fuzz.py::test_no_request_ends_or_breaks_the_server",
        )
        for endpoint in ("chat.OpenAIServingChat", "completions.OpenAIServingCompletion")
    ),
    Seam(
        target=_SRT + "function_call.function_call_parser.FunctionCallParser.__init__",
        kind=Kind.AROUND,
        ours=_OURS + "bad_bodies:make_tool_parser",
        reason="/parse_function_call without the name of a parser is an HTTP 500.",
        proof="tests/repairs/test_bad_bodies.py::test_a_body_is_a_500_without_the_row",
    ),
    Seam(
        target=_SRT + "managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        kind=Kind.AROUND,
        ours=_OURS + "weight_update:check_and_update",
        reason="Weights of another model are reported as a success, and outputs are wrong.",
        proof=_ENGINE + "test_weight_update.py::test_outputs_are_wrong_without_the_row",
    ),
    Seam(
        target=_SRT + "managers.schedule_batch.Req._check_str_based_finish",
        kind=Kind.AROUND,
        ours=_OURS + "stop_patterns:find_in_time",
        reason="A stop_regex can keep the scheduler busy for ever.",
        proof="tests/repairs/test_stop_patterns.py::test_a_pattern_takes_for_ever_without_the_row",
    ),
    Seam(
        target=_SRT + "managers.scheduler._dispatch_event_loop_once",
        kind=Kind.AROUND,
        ours=_OURS + "containment:run_loop",
        reason="An exception in a step ends the server, and with it every request.",
        proof=_ENGINE + "test_containment.py::test_the_server_ends_without_the_rows",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.get_next_batch_to_run",
        kind=Kind.AROUND,
        ours=_OURS + "containment:plan",
        reason="Requests that shared a failed step with a bad one are batched with it again.",
        proof="tests/repairs/test_containment.py::test_suspects_are_admitted_step_by_step",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.process_batch_result",
        kind=Kind.BEFORE,
        ours=_OURS + "containment:note_result",
        reason="If a result is processed in part, a token that ends a request is overlooked, and "
        "what was collected to be sent is lost.",
        proof="tests/repairs/test_containment.py::test_a_result_processed_in_part_is_undone",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.process_input_requests",
        kind=Kind.AROUND,
        ours=_OURS + "containment:take_in",
        reason="A request that cannot be queued ends the server.",
        proof="tests/repairs/test_containment.py::test_a_request_that_cannot_be_queued_is_ended",
    ),
    Seam(
        target=_SRT + "managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController._add_topology",
        kind=Kind.AFTER,
        ours=_OURS + "containment:add_report",
        reason="/server_info does not show what was contained.",
        proof=_ENGINE + "test_containment.py::test_the_guilty_get_500_and_others_their_answers",
    ),
    Seam(
        target=_SRT + "sampling.watermarking.core.WATERMARK_SECRET_FIELD_NAMES",
        kind=Kind.ASSIGN,
        ours=SECRETS,
        reason="/server_info shows --api-key and --admin-api-key to whoever has one of them, and "
        "the log has both.",
        proof="tests/repairs/test_operators.py::test_keys_are_shown_without_the_row",
    ),
    *(
        Seam(
            target=_SRT + f"managers.tokenizer_manager.TokenizerManager.{action}"
            "_expert_distribution_record",
            kind=Kind.BEFORE,
            ours=_OURS + "operators:refuse_without_recorder",
            reason="Without --expert-distribution-recorder-mode, it ends the server.",
            proof="tests/repairs/test_operators.py::test_the_recorder_raises_without_the_rows",
        )
        for action in ("start", "stop", "dump")
    ),
)
