"""Labels of this process's series in /metrics: SGLang's own."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_observability, get_parallel, get_serving


def metric_labels() -> dict[str, Any] | None:
    """Labels of this process's series in /metrics; None without --enable-metrics and on every rank
    but the first."""
    parallel, observed = get_parallel(), get_observability()
    if not observed.enable_metrics or parallel.tp_rank > 0:
        return None
    labels = {"model_name": get_serving().served_model_name, "tp_rank": parallel.tp_rank}
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    return {**labels, **(observed.extra_metric_labels or {})}
