"""The dashboard for Grafana asks for series that exist, and Grafana can read it. What Prometheus
answers: tests/engine/test_dashboard.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sglang

from sglang_dflash.plugins.repairs import containment
from sglang_dflash.serving.metrics.figures import COUNTS
from tests.dashboard import DASHBOARD, QUERIES, filled_in

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANELS = DASHBOARD["panels"]
COLUMNS = 24
# prometheus_client names SGLang's `sglang:x` as `sglang_x` to a Prometheus before version 3.
SERIES = r"sglang(?:_dflash_|\[:_\])\w+"


def of_ours() -> set[str]:
    rows = [(row.series, row.goes_down) for row in COUNTS if row.series]
    rows += [("info", True), *((name, False) for name in containment.SERIES)]
    return {f"sglang_dflash_{name}" + ("" if is_gauge else "_total") for name, is_gauge in rows}


def of_sglang() -> set[str]:
    collectors = Path(sglang.__path__[0], "srt/observability/metrics_collector.py").read_text()
    return set(re.findall(r'name="(sglang:\w+)"', collectors))


def test_every_series_exists() -> None:
    queries = [*QUERIES.values(), *(str(v["query"]) for v in DASHBOARD["templating"]["list"])]
    named = {name for query in queries for name in re.findall(SERIES, query)}
    named = {name.replace("[:_]", ":") for name in named}
    assert named <= of_ours() | of_sglang()
    # What an operator looks at is in it.
    shown = {
        "accepted_drafts", "draft_context_found", "steps", "contained_steps", "host_seconds",
        "loaded_back_tokens", "draft_kv_received_bytes",
    }  # fmt: skip
    assert {f"sglang_dflash_{name}_total" for name in shown} <= named


def test_every_query_is_of_the_chosen_models() -> None:
    for query in QUERIES.values():
        names, chosen = re.findall(SERIES, query), query.count('model_name=~"$model"}')
        assert names and len(names) == chosen == query.count("{")
        filled_in(query, "1m")


def test_grafana_can_read_it() -> None:
    """The shape that Grafana 10 and 11 migrate no panel of."""
    assert DASHBOARD["schemaVersion"] in (38, 39) and DASHBOARD["uid"] and DASHBOARD["title"]
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["model"]["datasource"] == SOURCE
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat", "table")
        assert panel["title"] and panel["description"] and panel["datasource"] == SOURCE
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and letters == sorted(set(letters))
        assert all(target["datasource"] == SOURCE for target in panel["targets"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_covers_no_other(panel: dict[str, Any]) -> None:
    def cells(of: dict[str, Any]) -> set[tuple[int, int]]:
        at = of["gridPos"]
        rows, columns = range(at["y"], at["y"] + at["h"]), range(at["x"], at["x"] + at["w"])
        return {(row, column) for row in rows for column in columns}

    assert cells(panel) and max(column for _, column in cells(panel)) < COLUMNS
    assert not [other for other in PANELS if other != panel and cells(other) & cells(panel)]
