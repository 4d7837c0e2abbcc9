"""Counts of decode steps, warnings, and the shown metrics: /server_info, /metrics and the docs name
the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from prometheus_client.metrics import MetricWrapperBase
from sglang.srt.managers.schedule_batch import Req

import sglang_dflash
from sglang_dflash.drafting.acceptance_length import JUDGED_STEPS, VerifySteps
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.options import Finding
from sglang_dflash.drafting.width import AdaptiveWidth
from sglang_dflash.plugins.repairs import containment
from sglang_dflash.serving.metrics.counts import AcceptanceCounts, DraftWatch, RequestStep
from sglang_dflash.serving.metrics.figures import COUNTS, SET_UP
from sglang_dflash.serving.metrics.server_info import ENOUGH_STEPS
from sglang_dflash.serving.metrics.step_times import StepTimes
from sglang_dflash.serving.start import choose_worker
from sglang_dflash.serving.step.scheduler import count_kept_tokens
from sglang_dflash.serving.step.step import Step
from tests import ROOT
from tests.conftest import random_model, raw_config, with_own
from tests.recording import OpRecorder
from tests.serving.batches import batch_of, request_of
from tests.serving.in_process import prefill_of, worker_of
from tests.serving.metrics.test_step_times import Clock

PAGE = (ROOT / "docs/metrics.md").read_text()
LABELS = {"model_name": "m"}


# -- which steps and tokens count, from what SGLang's scheduler does with a step's result


def request(output: int = 1, **params: Any) -> Req:
    return request_of(str(output), 5, output, **{"top_k": 20, **params})


def takes(accepted: int, kept: int | None = None, appended: int | None = None) -> Any:
    """The scheduler's work on a live request: `accepted` drafts and the bonus token, of which a
    grammar leaves `appended`, and the end of the request `kept`."""

    def process(request: Req) -> None:
        request.spec_verify_ct += 1
        request.spec_num_correct_drafts += accepted
        before = len(request.output_ids)
        request.output_ids.extend([7] * (accepted + 1 if appended is None else appended))
        if kept is not None:
            request.finished_len = before + kept

    return process


def skipped(request: Req) -> None:
    """A request that has finished, or was retracted."""


def processed(
    counts: Any,
    requests: list[Req],
    work: list[Callable[[Req], None]],
    width: int = 8,
    single: tuple[bool, ...] = (),
) -> None:
    """`single`: which requests take one token; by default none."""

    def original(processor: Any, batch: Any, result: Any) -> None:
        for request, process in zip(batch.reqs, work, strict=True):
            process(request)

    worker = SimpleNamespace(learn=lambda steps, _width, _accepted: counts.add(steps))
    processor = SimpleNamespace(model_worker=SimpleNamespace(dflash=worker))
    given = SimpleNamespace(in_flight=width)
    zeros = torch.zeros(len(requests), width, dtype=torch.int64)
    step = Step(zeros, zeros, zeros, zeros, single or [False] * len(requests))
    result = SimpleNamespace(
        speculative_num_draft_tokens=width, cap_lens=step.verified_tokens, next_draft_input=given
    )
    count_kept_tokens(original, processor, batch_of(*requests), result)
    assert given.in_flight == 0


def test_what_a_request_does_not_keep_is_not_counted() -> None:
    counts = AcceptanceCounts(8)
    assert counts.acceptance_length is None and counts.by_position() == []
    work = [
        takes(3),
        skipped,
        # max_new_tokens, or a stop, behind the second accepted draft.
        takes(7, kept=2),
        # A grammar ends behind the first accepted draft.
        takes(5, appended=1),
        # The end is the bonus token.
        takes(2, kept=3),
    ]
    processed(counts, [request(i + 1) for i in range(5)], work)
    assert counts.drafted == VerifySteps(4, 4 + 2 + 1 + 3)
    assert counts.acceptance_length == 2.5
    assert counts.accepted == [4, 3, 1, 0, 0, 0, 0]
    assert counts.by_position() == [1.0, 0.75, 0.25, 0, 0, 0, 0]
    assert counts.undrafted == VerifySteps()


def test_steps_without_drafts_are_counted_separately() -> None:
    counts, requests, single = AcceptanceCounts(8), [request(), request()], (True, False)
    processed(counts, requests, [takes(0), takes(4)], single=single)
    processed(counts, requests, [takes(0), takes(0)], width=1, single=single)
    assert counts.drafted == VerifySteps(1, 5) and counts.undrafted == VerifySteps(3, 3)


def test_a_position_is_divided_by_the_steps_that_drafted_it() -> None:
    counts = AcceptanceCounts(8)
    processed(counts, [request()], [takes(1)], width=4)
    processed(counts, [request()], [takes(7)], width=8)
    assert counts.accepted == [2, 1, 1, 1, 1, 1, 1]
    assert counts.by_position() == [1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


# -- what is warned of, once


class Fed:
    """A watch, its counters, and what it has logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture, **kwargs: Any) -> None:
        self.counters, self._caplog = DraftCounters("cpu"), caplog
        self.watch = DraftWatch(self.counters, 416, **kwargs)

    def step(self, steps: int, length: float, nonfinite: int = 0, found: float = 1.0) -> None:
        self.counters.add_nonfinite(torch.ones(nonfinite, dtype=torch.bool))
        columns = torch.arange(100, dtype=torch.int32)
        entries = columns.where(columns < 100 * found, -1)[None]
        self.counters.add_context(ContextTable(entries, torch.tensor([100])))
        self.counters.send()
        self.watch.add([RequestStep(7, round(length) - 1, round(length))] * steps)

    @property
    def logged(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("steps", "what", "warned"),
    [
        (JUDGED_STEPS // 2, {"length": 3.0}, None),
        (JUDGED_STEPS // 2, {"length": 1.0}, "acceptance length 1.00 .*sglang-dflash doctor"),
        (1, {"length": 1.0, "nonfinite": 7}, "NaN or Inf"),
        (
            JUDGED_STEPS // 2,
            {"length": 3.0, "found": 0.4},
            r"held 40% of the context .*--speculative-dflash-draft-kv-tokens \(now 416\)",
        ),
        # A prefix that another request has left is not complete at first.
        ((JUDGED_STEPS - 1) // 8, {"length": 1.0, "found": 0.0}, None),
    ],
)
def test_a_draft_of_little_use_is_warned_of_once(
    steps: int, what: dict[str, Any], warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    fed = Fed(caplog)
    for _ in range(8):
        fed.step(steps, **what)
    assert len(fed.logged) == (warned is not None)
    assert warned is None or re.search(warned, fed.logged[0])
    assert fed.watch.alarm.raised == ("acceptance length" in str(warned))
    counts = fed.counters.read()
    assert counts.nonfinite == 8 * what.get("nonfinite", 0)
    assert counts.context_share == what.get("found", 1.0)


def test_other_ranks_do_not_log(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog, speaks=False)
    fed.step(JUDGED_STEPS, 1.0, nonfinite=1, found=0.0)
    assert fed.logged == [] and fed.watch.alarm.raised


def test_only_steps_with_drafts_are_judged(caplog: pytest.LogCaptureFixture) -> None:
    fed = Fed(caplog)
    fed.watch.add([RequestStep(0, 0, 1)] * (2 * JUDGED_STEPS))
    assert fed.watch.alarm.recent is None
    fed.watch.add([RequestStep(7, 0, 1), RequestStep(7, 2, 3)] * JUDGED_STEPS)
    assert fed.watch.alarm.recent == fed.watch.recent_acceptance_length == 2.0


def test_that_drafts_do_not_pay_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The server's own steps tell it: 40 % of their time is the drafts'."""
    worker = worker_of()
    figures = worker.figures
    figures.times = StepTimes(clock := Clock())
    for _ in range(ENOUGH_STEPS):
        with figures.times.step():
            for phase, seconds in {"propose": 0.3, "verify": 0.5, "commit": 0.1}.items():
                with figures.times.phase(phase):
                    clock.passes(seconds)
            clock.passes(0.1)
    worker.widths.steps[4] += ENOUGH_STEPS

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "do not pay" in r.getMessage()]

    worker.learn([RequestStep(3, 1, 2)] * JUDGED_STEPS, 4, {})
    assert told() == []
    seldom = [RequestStep(3, 1, 2), *[RequestStep(3, 0, 1)] * 3] * (JUDGED_STEPS // 4)
    for _ in range(4):
        worker.learn(seldom, 4, {})
    (line,) = told()
    assert "acceptance length 1.62, and a step takes 1.67 times" in line
    assert figures.watch.alarm.raised is False


# -- what is shown


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """Return the registry that holds the test's series."""
    made = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        real = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client, kind, lambda *a, real=real, **k: real(*a, registry=made, **k)
        )
    return made


def test_the_series_follow_the_figures(registry: prometheus_client.CollectorRegistry) -> None:
    worker = worker_of(labels=LABELS)

    def shown(name: str, **labels: Any) -> float | None:
        return registry.get_sample_value(f"sglang_dflash_{name}", LABELS | labels)

    names = ("verify_steps", "committed_tokens", "undrafted_steps", "undrafted_tokens")
    assert [shown(f"{name}_total") for name in names] == [0, 0, 0, 0]
    set_up = {"worker": "sglang-dflash", "block": "4", "window": "all"}
    assert shown("info", **set_up, version=sglang_dflash.__version__) == 1
    assert shown("acceptance_alarm") == shown("nonfinite_outputs_total") == 0
    assert shown("accepted_drafts_total", position="3") == shown("steps_total", width="4") == 0
    worker.learn([RequestStep(3, 2, 3), RequestStep(3, 1, 1), RequestStep(0, 0, 1)], 4, {})
    worker.widths.steps[4] += 2
    worker.learn([RequestStep(3, 0, 1)] * JUDGED_STEPS, 4, {})
    report = worker.figures.report()
    assert [shown(f"{name}_total") for name in names] == [report[name] for name in names]
    assert report["draft_context_share"] is None
    assert report["verify_steps"] == JUDGED_STEPS + 2 and shown("steps_total", width="4") == 2
    for position, accepted in enumerate(report["accepted_drafts"], 1):
        assert shown("accepted_drafts_total", position=str(position)) == accepted
    assert shown("acceptance_alarm") == report["acceptance_alarm"] == 1
    counters = worker.drafter.counters
    entries = torch.tensor([[0, -1, -1, 5]], dtype=torch.int32)
    counters.add_context(ContextTable(entries, torch.tensor([9])))
    counters.send()
    worker.figures.times.seconds |= {"propose": 0.25, "verify": 0.5}
    worker.learn([RequestStep(3, 3, 4)] * JUDGED_STEPS, 4, {})
    assert shown("acceptance_alarm") == 0
    context = [shown(f"draft_context_{what}_total") for what in ("sought", "found")]
    assert context == [4, 2] and worker.figures.report()["draft_context_share"] == 0.5
    times = [shown("host_seconds_total", phase=phase) for phase in ("propose", "verify")]
    assert times == [0.25, 0.5]


def test_a_series_is_looked_up_by_its_labels_once(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step changes some thirty of them."""
    looked_up, labels = list[Any](), MetricWrapperBase.labels
    monkeypatch.setattr(
        MetricWrapperBase, "labels", lambda *a, **k: (looked_up.append(k), labels(*a, **k))[1]
    )
    worker = worker_of(labels=LABELS)
    # The first one's own host time is shown by the second.
    for _ in range(2):
        worker.learn([RequestStep(3, 2, 3)], 4, {})
    before = len(looked_up)
    worker.learn([RequestStep(3, 2, 3)], 4, {})
    name = "sglang_dflash_verify_steps_total"
    assert len(looked_up) == before > 0 and registry.get_sample_value(name, LABELS) == 3


def test_a_prefill_shows_what_it_has_counted(
    registry: prometheus_client.CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """It shows it when the next one begins: a prefill server has no other steps."""
    worker = worker_of(labels=LABELS)
    worker.figures.host_tier = SimpleNamespace(loaded=6, loaded_draft=5)
    forward = worker.target_worker.forward_batch_generation

    def overflowing(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.logits_output.hidden_states[:] = float("inf")
        return result

    worker.target_worker.forward_batch_generation = overflowing
    for _ in range(2):
        worker.forward_batch_generation(prefill_of([0], [9]))
    shown = {"nonfinite_outputs": 9, "loaded_back_tokens": 6, "loaded_back_draft_kv": 5}
    report = worker.figures.report()
    for name, count in shown.items():
        value = registry.get_sample_value(f"sglang_dflash_{name}_total", LABELS)
        assert report[name] == value == count, name
    assert "NaN or Inf" in caplog.text


def test_an_operators_label_of_the_same_name_stays(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    """--extra-metric-labels."""
    given = {"worker": "node-3", "width": "wide", "zone": "b"}
    worker_of(labels=LABELS | given)
    others = {"worker": "node-3", "zone": "b"}
    steps = LABELS | others | {"exported_width": "wide", "width": "4"}
    assert registry.get_sample_value("sglang_dflash_steps_total", steps) == 0
    (info,) = next(of.samples for of in registry.collect() if of.name == "sglang_dflash_info")
    assert (info.labels["worker"], info.labels["exported_worker"]) == ("sglang-dflash", "node-3")


def test_a_server_tells_what_the_head_reads() -> None:
    figures = worker_of().figures
    v1 = figures.describe()
    own = with_own(selector_rank=8, selector_top_k=5, conv_kernel_size=3, conv_group_size=8)
    figures.model = random_model(raw_config(**own))
    shown = figures.describe()
    # In float32, by the sizes in tests/tools/inspect/test_heads.py.
    names = ("draft_head_bytes", "draft_head_bytes_per_request")
    assert [v1[name] for name in names] == [0, 0]
    assert [shown[name] for name in names] == [4 * (8 * 32 + 36 * 160), 4 * 3 * 6 * 8]


def test_the_series_tell_if_sglangs_worker_serves(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs:
        def __init__(self, server_args: int) -> None:
            self.server_args = server_args

    spec = SimpleNamespace(speculative_num_draft_tokens=8, speculative_draft_window_size=None)
    monkeypatch.setattr(choose_worker, "get_spec", lambda: spec)
    # Installed patches would stay for the tests after this one.
    monkeypatch.setattr(choose_worker, "install_late", lambda *_: None)
    monkeypatch.setattr(choose_worker, "metric_labels", lambda: LABELS)
    worker = choose_worker.builtin_worker(Theirs, "--pp-size")(7)
    assert (worker.server_args, worker.builtin_reason) == (7, "--pp-size")
    told = {"worker": "builtin", "block": "8", "window": "all"}
    labels = LABELS | told | {"version": sglang_dflash.__version__}
    assert registry.get_sample_value("sglang_dflash_info", labels) == 1


def test_a_low_acceptance_is_put_down_to_what_was_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = Finding("block-above-trained", "--block: 100 is more than 8", "give 8")
    fed = Fed(caplog, warnings=[warning])
    fed.step(JUDGED_STEPS, 1.0)
    assert "first of all, --block: 100 is more than 8. `sglang" in fed.logged[0]
    report = worker_of(warnings=[warning]).figures.report()
    assert report["warnings"] == [warning._asdict()]


def test_keys_that_only_some_servers_have_are_documented() -> None:
    worker = worker_of()
    graphed = GraphedDrafter(worker.drafter, OpRecorder(), worker.req_to_token, (1,))
    keys = {*graphed.describe(), *graphed.report(), *AdaptiveWidth((1, 4)).report()}
    for key in keys - {row.key for row in (*SET_UP, *COUNTS)}:
        assert f"`{key}`" in PAGE, key


def test_queries_name_series_that_there_are() -> None:
    rows = [row for row in COUNTS if row.series]
    shown = {f"sglang_dflash_{row.series}{'' if row.goes_down else '_total'}" for row in rows}
    shown |= {f"sglang_dflash_{name}_total" for name in containment.SERIES}
    queried = set(re.findall(r"sglang_dflash_\w+", PAGE.split("## Queries and alerts")[1]))
    assert queried - shown == {"sglang_dflash_info"}
