"""Series of /metrics, and the rows that they and the keys of /server_info are made from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from sglang_dflash.common.markdown import plain

# Where the values come from.
S = TypeVar("S")
INFO_HELP = (
    "Always 1. Which DFLASH worker serves (sglang-dflash or builtin, SGLang's own), its block size "
    "and draft window, and the version of sglang-dflash."
)


class Figure(NamedTuple, Generic[S]):
    """A row.

    Attributes:
        key: in /server_info; "" if it is in /metrics only.
        source: the value: a number, numbers by position from 1 on, or numbers by width or phase.
        meaning: in Markdown, with links from the folder of the docs, which have a table of the
            rows; rows in a row with the same meaning share a line of it.
        series: its name in /metrics behind `sglang_dflash_`; "" if it is in /server_info only.
        label: what tells several numbers apart.
        goes_down: whether the series is a gauge.
    """

    key: str
    source: Callable[[S], Any]
    meaning: str
    series: str = ""
    label: str = ""
    goes_down: bool = False

    @property
    def help(self) -> str:
        """The meaning, as /metrics has it."""
        text = plain(self.meaning)
        return f"{text[:1].upper()}{text[1:]}."


class Series(Generic[S]):
    """The table's series of this process, with the labels of SGLang's own."""

    def __init__(self, rows: Iterable[Figure[S]], sources: S, labels: Mapping[str, Any]) -> None:
        # Imported late: SGLang first sets the directory in which its processes share metrics.
        from prometheus_client import Counter, Gauge

        rows = list(rows)
        labels = beside(labels, {row.label for row in rows})
        self._sources, self._labels = sources, labels
        self._metrics: list[tuple[Figure[S], Any]] = []
        # Of each series the value that it shows. To look a series up by its labels takes longer
        # than to change it.
        self._shown: dict[tuple[str, int | str], tuple[Any, float]] = {}
        for row in rows:
            if row.series:
                names = [*labels, row.label] if row.label else [*labels]
                options = {"multiprocess_mode": "mostrecent"} if row.goes_down else {}
                metric_class: Any = Gauge if row.goes_down else Counter
                metric = metric_class(f"sglang_dflash_{row.series}", row.help, names, **options)
                self._metrics.append((row, metric))
        self.update(first=True)

    def update(self, first: bool = False) -> None:
        """Show the values of now. A change is a write to a file.

        Args:
            first: show zeros too.
        """
        for row, metric in self._metrics:
            for at, value in _numbered(row.source(self._sources)):
                series, shown = self._shown.get((row.series, at), (None, 0))
                change = value - shown
                if not change and not first:
                    continue
                if series is None:
                    series = metric.labels(**self._labels, **({row.label: at} if row.label else {}))
                self._shown[row.series, at] = series, value
                if row.goes_down:
                    series.set(value)
                else:
                    series.inc(change)


def _numbered(value: Any) -> Iterable[tuple[int | str, float]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return enumerate(value, 1) if isinstance(value, Sequence) else [(0, value)]


def beside(labels: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Labels of a process for series that use the names `taken`. As in Prometheus, a label of such
    a name gets `exported_` before it: --extra-metric-labels gives any."""
    return {f"exported_{name}" if name in taken else name: value for name, value in labels.items()}


def show_info(of_process: Mapping[str, Any] | None, of_server: Mapping[str, str]) -> None:
    """A series that tells by its labels what serves.

    Args:
        of_process: labels of all series of this process; None for no series.
        of_server: see `serving.metrics.server_info.labels`.
    """
    if of_process is None:
        return
    from prometheus_client import Gauge  # Late, as in `Series`.

    shown = {**beside(of_process, of_server), **of_server}
    info = Gauge("sglang_dflash_info", INFO_HELP, list(shown), multiprocess_mode="mostrecent")
    info.labels(**shown).set(1)
