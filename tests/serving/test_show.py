"""The table of figures: what /server_info, /metrics and the docs name is the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from sglang_dflash.drafting.acceptance_length import JUDGED_STEPS
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.serving.show.counts import RequestStep
from sglang_dflash.serving.show.figures import COUNTS, SET_UP
from tests.recording import OpRecorder
from tests.serving.in_process import worker_of

PAGE = (Path(__file__).parents[2] / "docs/operating.md").read_text()
LABELS = {"model_name": "m"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """In which the series of the test are."""
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
    assert shown("acceptance_alarm") == shown("nonfinite_outputs_total") == 0
    assert shown("accepted_drafts_total", position="3") == shown("steps_total", width="4") == 0
    worker.learn([RequestStep(3, 2, 3), RequestStep(3, 1, 1), RequestStep(0, 0, 1)], 4, {})
    worker.widths.steps[4] += 2
    worker.learn([RequestStep(3, 0, 1)] * JUDGED_STEPS, 4, {})
    report = worker.figures.report()
    assert [shown(f"{name}_total") for name in names] == [report[name] for name in names]
    assert report["verify_steps"] == JUDGED_STEPS + 2 and shown("steps_total", width="4") == 2
    for position, accepted in enumerate(report["accepted_drafts"], 1):
        assert shown("accepted_drafts_total", position=str(position)) == accepted
    assert shown("acceptance_alarm") == report["acceptance_alarm"] == 1
    worker.learn([RequestStep(3, 3, 4)] * JUDGED_STEPS, 4, {})
    assert shown("acceptance_alarm") == 0


def test_every_key_and_series_is_documented() -> None:
    worker = worker_of()
    graphed = GraphedDrafter(worker.drafter, OpRecorder(), worker.req_to_token, (1,))
    keys = {row.key for row in (*SET_UP, *COUNTS) if row.key}
    assert keys <= set(worker.figures.report())
    keys |= {*graphed.describe(), *graphed.report()}
    table = PAGE.split("| key | meaning |")[1].split("\n\n")[0]
    series = PAGE.split("| series | counts |")[1].split("\n\n")[0]
    first_columns = re.findall(r"^\| (`.*?) \|", table, re.M)
    named = {name for cell in first_columns for name in re.findall(r"`(\w+)`", cell)}
    # Of a width policy: docs/width.md.
    assert named - {"width", "width_now", "width_steps"} == keys
    rows = {f"sglang_dflash_{row.series}" for row in COUNTS if row.series}
    counters = {f"{name}_total" for name in rows if not name.endswith("_alarm")}
    shown = re.findall(r"`(sglang_dflash_\w+)", series)
    assert set(shown) == counters | {"sglang_dflash_acceptance_alarm"}
