"""Rows of a table: which requests are compared on which server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.engine import answer_ends, workload
from tests.engine.checks import Check, Seen
from tests.engine.servers import Ask, ServerConfig
from tests.engine.session import ServerSession


class Row(NamedTuple):
    """The requests that are compared on one server.

    Attributes:
        also: checks after each comparison.
        long: of the requests those that only the tier `long` sends.
        same: compares the server's answers with the plain one's.
    """

    server: ServerConfig
    plain: ServerConfig
    asked: tuple[Ask, ...]
    also: tuple[Check, ...] = ()
    long: tuple[Ask, ...] = ()
    same: Callable[[Any, Any], None] = workload.assert_same_outputs


# What the plain server is asked in place of these, and the part of its answers that they are.
PARTS: dict[Ask, tuple[Ask, Callable[[Any], Any]]] = {
    workload.run_half: (workload.run, workload.halved),
    workload.some_short_and_demo: (workload.run, workload.half_of_two),
    workload.hang_ups: (workload.run, lambda answers: answers["demo"][:8:2]),
    workload.joining: (workload.alone, lambda answers: answers),
    workload.seeded_alone: (workload.seeded, lambda answers: answers[: len(workload.SAMPLING)]),
    answer_ends.ends_once: (answer_ends.ends, answer_ends.once),
}


def cases(table: Iterable[Row]) -> Iterator[Any]:
    """A row's server, the row, and one of its requests."""
    for row in table:
        for ask in row.asked:
            reference, _ = PARTS.get(ask, (ask, None))
            marks = [pytest.mark.recorded(row.plain, reference)]
            marks += [pytest.mark.long] * (ask in row.long)
            yield pytest.param(row.server, row, ask, id=f"{row.server}-{ask.__name__}", marks=marks)


def compare(
    row: Row, ask: Ask, answers: Callable[..., Any], server: Server, servers: ServerSession
) -> None:
    """The row's server answers as its plain one."""
    reference, part = PARTS.get(ask, (ask, lambda answers: answers))
    ours, theirs = answers(row.server, ask), part(answers(row.plain, reference))
    row.same(ours, theirs)
    for check in row.also:
        check(Seen(row.server, row.plain, ours, theirs, server, servers))
