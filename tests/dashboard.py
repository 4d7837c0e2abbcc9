"""The panels of examples/grafana_dashboard.json, and what they ask of Prometheus."""

from __future__ import annotations

import json
from typing import Any

from tests import ROOT

FILE = ROOT / "examples/grafana_dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
# (title, letter) -> expression.
QUERIES: dict[tuple[str, str], str] = {
    (panel["title"], target["refId"]): target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}


def filled_in(query: str, interval: str) -> str:
    """Return the query as Grafana sends it, of all models."""
    query = query.replace("$__rate_interval", interval).replace("$model", ".*")
    assert "$" not in query
    return query
