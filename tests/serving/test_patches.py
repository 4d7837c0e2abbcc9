"""SGLang without the rows of serving's patches."""

from __future__ import annotations

import argparse
import pkgutil
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.patches.patch import Patch
from sglang_dflash.plugins.repairs import patches as repairs
from sglang_dflash.serving.metrics import figures
from sglang_dflash.serving.patches import (
    BUILTIN_PATCHES,
    PATCHES,
    REPLAY_PATCHES,
    SAMPLING_PATCHES,
    WORKER_PATCHES,
)
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step import sampling, scheduler
from tests.patches.originals import original
from tests.serving.batches import request_of

ROWS = [*PATCHES, *WORKER_PATCHES, *BUILTIN_PATCHES, *REPLAY_PATCHES]
OURS = ["--speculative-dflash-worker", "builtin"]


def row_of(name: str) -> Patch:
    return next(row for row in ROWS if row.attribute == name)


def sglang_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    original(row_of("add_cli_args").target)(parser)
    return parser


def test_our_flags_are_unknown_without_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    parser = sglang_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "x", *OURS])
    assert "unrecognized arguments: --speculative-dflash-worker" in capsys.readouterr().err
    flags.add_flags(None, parser)
    assert parser.parse_args(["--model-path", "x", *OURS]).speculative_dflash_worker == "builtin"


def test_our_values_are_dropped_without_the_row() -> None:
    parser = sglang_parser()
    flags.add_flags(None, parser)
    parsed = parser.parse_args(["--model-path", "x", *OURS])
    made = original(row_of("from_cli_args").target)
    made = getattr(made, "__func__", made)
    server_args = made(ServerArgs, parsed)
    assert flags.ServerFlags.of(server_args).worker == "auto"
    flags.keep_flags(server_args, ServerArgs, parsed)
    assert flags.ServerFlags.of(server_args).worker == "builtin"


def test_engine_rejects_our_arguments_without_the_row() -> None:
    ours = {"model_path": "x", "speculative_dflash_worker": "builtin"}
    with pytest.raises(TypeError, match="speculative_dflash_worker"):
        ServerArgs(**ours)
    made = flags.server_args_from_kwargs(**ours)
    assert flags.ServerFlags.of(made).worker == "builtin"


def test_the_builtin_worker_serves_without_the_row() -> None:
    create = original(row_of("create_worker").target)
    worker = create(SpeculativeAlgorithm.DFLASH, SimpleNamespace())
    assert worker.__module__ == "sglang.srt.speculative.dflash_worker_v2"


def test_free_slots_are_held_back_without_the_row() -> None:
    resolve = original(row_of("resolve_min_free_slots").target)
    assert [resolve(None, size, is_dflash_family=True) for size in (7, 8, 48)] == [None, 2, 4]
    for given in (None, 1, 3, 100):
        threshold = scheduler.admit_into_any_free_slot(resolve, given, 48, is_dflash_family=True)
        assert threshold == resolve(given, 48, is_dflash_family=False)


def test_requests_are_refused_without_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """These ask for hidden states under overlap, or for sampling masks without SGLang's kernel."""
    validate = original(row_of("validate_dflash_request").target)
    request = request_of(return_hidden_states=True, min_p=0.1, top_k=20)
    assert "hidden" in validate(request, True)
    assert scheduler.serve_hidden_states(validate, request, True) is None
    validate = original(row_of("validate_spec_sampling_mask_request").target)
    dflash = SimpleNamespace(is_dflash_family=lambda: True)
    assert "min_p" in validate(request, dflash)
    assert sampling.refuse_simulated_masks(validate, request, dflash) is None
    request.sampling_params.min_p = 0
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    refusal = sampling.refuse_simulated_masks(validate, request, dflash)
    assert refusal is not None and "simulated" in refusal


REPORTER, TOKENIZER = (
    "sglang.srt.managers.scheduler_components.metrics_reporter",
    "sglang.srt.managers.tokenizer_manager",
)


def reporter_of(correct: int, steps: int, verified: int, decoded: int) -> Any:
    """SGLang's, after so many steps, of which it reports every tenth."""
    reporter = MagicMock(
        current_scheduler_metrics_enabled=False, is_stats_logging_rank=True,
        enable_mfu_metrics=False, decode_log_interval=10, forward_ct_decode=decoded,
        last_decode_stats_tic=0.0, num_generated_tokens=correct + steps,
        spec_num_correct_drafts=correct, spec_num_accept_tokens=correct + steps,
        spec_num_forward_ct=steps, spec_num_cap_tokens=verified,
        spec_num_block_accept_tokens=0,
    )  # fmt: skip
    reporter.scheduler.spec_algorithm.is_none.return_value = False
    reporter.scheduler.spec_algorithm.is_dspark.return_value = False
    return reporter


def late_failure(report: Any) -> Any:
    """A report that fails once it is made."""

    def failing(*args: Any) -> None:
        report(*args)
        raise KeyError

    return failing


def test_rates_are_of_whole_blocks_without_the_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty steps of a server with blocks of 8: five verified 4 tokens each, the others one, and
    ten drafts were accepted of fifteen."""
    spec = SimpleNamespace(speculative_algorithm="DFLASH", speculative_num_draft_tokens=8)
    for module in (our_batch, scheduler, *map(pkgutil.resolve_name, (REPORTER, TOKENIZER))):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    monkeypatch.setattr(f"{REPORTER}.get_disagg", lambda: SimpleNamespace(language_only=False))
    caplog.set_level("INFO", REPORTER)
    report = original(row_of("report_decode_stats").target)
    report(reporter_of(10, 20, 35, decoded=20), False)
    scheduler.rate_of_proposed(report, reporter_of(10, 20, 35, decoded=20), False)
    scheduler.rate_of_proposed(report, reporter_of(0, 20, 20, decoded=20), False)
    rates = re.findall("accept rate: ([0-9.]+)", caplog.text)
    assert rates == [f"{10 / 140:.2f}", f"{10 / 15:.2f}", "0.00"]
    unreported = reporter_of(10, 19, 34, decoded=19)
    scheduler.rate_of_proposed(report, unreported, False)
    assert unreported.spec_num_correct_drafts == 10

    failed = reporter_of(10, 19, 34, decoded=20)
    failed.scheduler.pool_stats_observer.get_pool_stats.side_effect = KeyError
    with pytest.raises(KeyError):
        scheduler.rate_of_proposed(report, failed, False)
    assert failed.spec_num_correct_drafts == 10
    # SGLang has begun to count anew before it fails.
    failed = reporter_of(10, 20, 35, decoded=20)
    with pytest.raises(KeyError):
        scheduler.rate_of_proposed(late_failure(report), failed, False)
    assert failed.spec_num_correct_drafts == 0

    received = SimpleNamespace(
        spec_verify_ct=[20], spec_num_correct_drafts=[10], completion_tokens=[30],
        spec_num_cap_tokens=[35], spec_correct_drafts_histogram=[],
    )  # fmt: skip
    shown: dict[str, Any] = {}
    original(row_of("_calculate_spec_decoding_metrics").target)(None, shown, received, 0)
    assert (shown["spec_num_proposed_drafts"], shown["spec_accept_rate"]) == (140, 10 / 140)
    scheduler.rate_of_answer(None, None, shown, received, 0)
    assert (shown["spec_num_proposed_drafts"], shown["spec_accept_rate"]) == (15, 10 / 15)


def test_no_request_is_for_scores_without_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_algorithm="DFLASH")
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_spec", lambda: spec)
    theirs = original(row_of("is_prefill_only").target).fget
    for tokens, ours in ((0, True), (1, False)):
        request = request_of(max_new_tokens=tokens)
        assert theirs(request) is False
        assert scheduler.asks_no_token(request) is ours


@pytest.mark.parametrize(
    "positions",
    [{"token_indices_to_pool": [torch.tensor([1])]},
     {"multi_item_delimiter_indices": [torch.tensor([2])]}, {}],
    ids=["scores", "items", "last"],
)  # fmt: skip
def test_a_scored_prompt_has_no_hidden_states_without_the_row(positions: dict[str, Any]) -> None:
    numbers, hidden = torch.arange(3), torch.rand(3, 2)
    batch: Any = object.__new__(ForwardBatch)
    for each in fields(ForwardBatch):
        setattr(batch, each.name, None)
    batch.forward_mode, batch.capture_hidden_mode = ForwardMode.EXTEND, CaptureHiddenMode.FULL
    batch.extend_seq_lens, batch.is_prefill_only = torch.tensor([3]), True
    for name, value in positions.items():
        setattr(batch, name, value)
    processor: Any = object.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.expected_aux_hidden_states, processor.keep_last_hidden_states = None, False
    processor._get_logits = lambda states, *_: states
    given = processor, numbers, hidden, None, batch, [hidden + 1, hidden + 2]
    output = original(row_of("forward").target)(*given)
    kept, whole = output.hidden_states, torch.cat((hidden + 1, hidden + 2), 1)
    assert kept is None if positions else kept.equal(whole)
    our_batch.keep_hidden_states(output, *given)
    assert output.hidden_states.equal(whole)


def test_a_session_counts_an_unwritten_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of 4 prompt and 3 output tokens: 6 have been through the target, SGLang counts 7."""
    spec = SimpleNamespace(speculative_algorithm="DFLASH")
    monkeypatch.setattr(our_batch, "get_spec", lambda: spec)
    request = request_of(prompt=4, output=3, session=SimpleNamespace(session_id="s"))
    kv = request.kv
    kv.kv_committed_len = 7
    sessions = SimpleNamespace(slots={"s": SimpleNamespace(kv=kv)})
    assert scheduler.without_last_token(True, sessions, request) is True
    assert kv.kv_committed_len == 6
    spec.speculative_algorithm = None
    kv.kv_committed_len = 7
    scheduler.without_last_token(True, sessions, request)
    assert kv.kv_committed_len == 7


def test_server_info_shows_no_worker_without_the_row() -> None:
    runner = SimpleNamespace(dtype=torch.bfloat16)
    reporting = SimpleNamespace(report=lambda: {"worker": "ours"})
    builtin = SimpleNamespace(builtin_reason="--pp-size")
    for draft_worker, shown in (
        (None, {}),
        (reporting, {"dflash": {"worker": "ours"}}),
        (builtin, {"dflash_builtin_reason": "--pp-size"}),
    ):
        tp_worker = SimpleNamespace(model_runner=runner)
        scheduler = SimpleNamespace(draft_worker=draft_worker, tp_worker=tp_worker)
        state: dict[str, Any] = {}
        figures.add_report(None, SimpleNamespace(scheduler=scheduler), state)
        machine = state.pop("machine")
        assert state == shown and machine["dtype"] == "bfloat16" and machine["cores"]


def test_the_worker_installs_what_it_samples_with() -> None:
    """It does without the repairs, too: SGLang leaves penalties of a block uncounted, and its
    samplers refuse seeds. With them, the rows are in place, and the same."""
    assert SAMPLING_PATCHES and {*SAMPLING_PATCHES} <= {*WORKER_PATCHES} & {*repairs.PATCHES}
    shared = {row.target for row in repairs.PATCHES} & {row.target for row in ROWS}
    assert shared == {row.target for row in SAMPLING_PATCHES}


def test_tables_that_are_applied_later_have_targets_of_their_own() -> None:
    """A row is refused if another one has changed its target before."""
    early = {row.target for row in PATCHES}
    worker, replay = ({row.target for row in table} for table in (WORKER_PATCHES, REPLAY_PATCHES))
    assert not (early & worker or early & replay or worker & replay)
