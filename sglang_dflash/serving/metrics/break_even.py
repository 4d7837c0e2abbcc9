"""The acceptance length from which drafts pay on a server, by the times that it has measured.

A step with drafts pays if it gives a request more tokens than plain decoding gives in the same
time: if the acceptance length is above the step's time divided by that of a plain step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class BreakEven(NamedTuple):
    """The acceptance length from which a step of some width pays, at some batch size and context.

    Attributes:
        requests: largest number of requests in the batch.
        context: the longest request has fewer tokens than this.
        width: tokens per request that the target verifies.
        acceptance_length: from which on steps of that width pay.
    """

    requests: int
    context: int
    width: int
    acceptance_length: float


def measured(report: Mapping[str, Any]) -> list[BreakEven]:
    """Break-even points of a server with an adaptive width, which runs plain steps, too.

    Args:
        report: our worker's, as /server_info shows it.
    """
    points = []
    for place in report.get("width_costs") or ():
        costs = {int(width): ms for width, ms in place["milliseconds"].items() if ms}
        plain = costs.pop(1, None)
        if plain is not None:
            at = place["requests"], place["context"]
            points += [BreakEven(*at, width, round(ms / plain, 2)) for width, ms in costs.items()]
    return points


def least(report: Mapping[str, Any]) -> float | None:
    """A bound that the break-even of a server on a CPU is not below; None before a step.

    A plain step needs no draft, and its forward, over one token per request, takes no longer than
    that over a block. (An accelerator's parts are not known by the host's clock.)

    Args:
        report: as for `measured`.
    """
    shares = report.get("step_shares")
    plain = shares["verify"] + shares["host"] if shares else 0.0
    return round(1 / plain, 2) if plain > 0 else None


def told(points: list[BreakEven]) -> str:
    """Break-even points in words, of the shortest contexts that were measured."""
    by_requests = dict[int, list[BreakEven]]()
    for point in sorted(points):
        shortest = by_requests.setdefault(point.requests, [])
        if not shortest or shortest[0].context == point.context:
            shortest.append(point)
    return "; ".join(
        f"{_requests(number)} {_widths(group)}" for number, group in by_requests.items()
    )


def _requests(number: int) -> str:
    return "with one request" if number == 1 else f"with up to {number} requests"


def _widths(points: list[BreakEven]) -> str:
    return ", ".join(f"{point.acceptance_length:.2f} at width {point.width}" for point in points)
