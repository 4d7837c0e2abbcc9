"""What a running server shows: /server_info, and /metrics if it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests


class NotReadable(Exception):
    """There is no answer that could be judged. The message names the URL and the reason."""


@dataclass(frozen=True)
class Reading:
    """One reading of a server.

    Attributes:
        info: the answer of /server_info.
        metrics: of /metrics, each series' values over all labels, by name; None without
            --enable-metrics.
    """

    info: Mapping[str, Any]
    metrics: Mapping[str, list[float]] | None = None

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """The state of every data-parallel rank."""
        return list(self.info.get("internal_states") or [])

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """Our worker's report of every data-parallel rank; empty if another worker serves."""
        return [state["dflash"] for state in self.states if state.get("dflash")]

    def total(self, name: str) -> int:
        """A count of our worker, over all ranks. 0 if it does not report it."""
        return sum(report.get(name) or 0 for report in self.reports)

    def any(self, name: str) -> bool:
        """Whether a rank reports `name` as true."""
        return any(report.get(name) for report in self.reports)

    def least(self, name: str) -> float | None:
        """The smallest value that a rank reports; None if none does."""
        values = [report[name] for report in self.reports if report.get(name) is not None]
        return min(values, default=None)

    def metric(self, name: str) -> float | None:
        """The sum of a series in /metrics; None if it is not there."""
        values = (self.metrics or {}).get(name)
        return sum(values) if values else None


def read(url: str, timeout_s: float, api_key: str | None = None) -> Reading:
    """Ask the server.

    Args:
        url: as for other clients, with or without a path such as /v1.
        timeout_s: for each answer, in seconds.
        api_key: of a server with --api-key.

    Raises:
        NotReadable: no server, no answer in time, or not that of an SGLang server.
    """
    base = _base(url)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    answer = _get(f"{base}/server_info", timeout_s, headers)
    if answer.status_code in (401, 403):
        raise NotReadable(f"{base}/server_info answers {answer.status_code}; give --api-key")
    try:
        info = answer.json() if answer.ok else None
    except requests.JSONDecodeError:
        info = None
    if not isinstance(info, dict) or "internal_states" not in info:
        raise NotReadable(
            f"{base}/server_info answers {answer.status_code} and is not that of an SGLang server"
        )
    shown = _get(f"{base}/metrics", timeout_s, headers)
    return Reading(info, series(shown.text) if shown.ok else None)


def _base(url: str) -> str:
    base = url if "://" in url else f"http://{url}"
    return base.rstrip("/").removesuffix("/v1")


def _get(url: str, timeout_s: float, headers: dict[str, str]) -> requests.Response:
    try:
        return requests.get(url, timeout=timeout_s, headers=headers)
    except requests.Timeout as error:
        raise NotReadable(
            f"{url} gave no answer within {timeout_s:g} s: the scheduler hangs, or is gone"
        ) from error
    except requests.RequestException as error:
        raise NotReadable(f"{url} cannot be reached: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost reason: requests wraps what the system says three times."""
    while (inner := error.__context__ or error.__cause__) is not None:
        error = inner
    return str(error) or type(error).__name__


def series(text: str) -> dict[str, list[float]]:
    """Values by name from Prometheus's text format, labels dropped."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if not head or head.startswith("#"):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found.setdefault(head.partition("{")[0], []).append(number)
    return found
