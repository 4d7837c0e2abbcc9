"""Every row of every table of patches: its target exists, ours takes its arguments, its proof is
there.

What SGLang does without a row is shown by the test that the row names as its proof.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dflash.patches.patch import Kind, Patch
from sglang_dflash.plugins.platform_cpu import patches as platform_cpu
from sglang_dflash.plugins.repairs import patches as repairs
from sglang_dflash.serving import patches as serving
from tests import ROOT
from tests.patches.originals import original

TABLES = {
    "serving": serving.PATCHES,
    "worker": serving.WORKER_PATCHES,
    "builtin": serving.BUILTIN_PATCHES,
    "replay": serving.REPLAY_PATCHES,
    "repairs": repairs.PATCHES,
    "platform_cpu": platform_cpu.PATCHES,
}
ROWS = [
    pytest.param(row, id=f"{table}-{row.target}") for table, rows in TABLES.items() for row in rows
]
every_row = pytest.mark.parametrize("row", ROWS)
# torch does not publish the arguments of these.
ASSIGNED = {
    "torch.Tensor.record_stream": lambda self, stream: None,
    "torch.Tensor.pin_memory": lambda self, device=None: None,
    # A class, which SGLang calls with keywords only.
    "sglang.srt.entrypoints.engine.Engine.server_args_class": lambda **kwargs: None,
}
# What a hook is given before the arguments of its target.
GIVEN_FIRST = {Kind.AFTER: 1, Kind.AROUND: 1}


@every_row
def test_the_target_exists(row: Patch) -> None:
    assert hasattr(pkgutil.resolve_name(row.parent), row.attribute)


def function_of(row: Patch) -> Any:
    """Ours, or the value that is assigned."""
    return pkgutil.resolve_name(row.ours) if isinstance(row.ours, str) else row.ours


def takes_all(row: Patch, ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Bind every argument of `theirs` to `ours` by position, and if ours stands in, by name."""
    parameters = list(inspect.signature(theirs).parameters.values())
    named = dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    either = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [object()] * GIVEN_FIRST.get(row.kind, 0)
    mine = inspect.signature(ours)
    mine.bind(*first, *either, **named)
    if row.kind is Kind.REPLACE:
        this = either[: either[:1] == ["self"]]
        mine.bind(*first, *this, **dict.fromkeys(either[len(this) :]), **named)


@every_row
def test_ours_takes_the_arguments_of_the_target(row: Patch) -> None:
    ours = function_of(row)
    if not callable(ours):
        return
    theirs = ASSIGNED.get(row.target) or original(row.target)
    theirs = getattr(theirs, "fget", theirs)
    takes_all(row, ours, getattr(theirs, "__func__", theirs))


KERNELS = [row for row in platform_cpu.PATCHES if row.target.startswith("sglang.kernels.ops.")]


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.target)
def test_names_and_defaults_are_those_of_the_target(row: Patch) -> None:
    both = original(row.target), function_of(row)
    theirs, ours = (inspect.signature(function).parameters for function in both)
    assert list(theirs) == list(ours)
    assert [p.default for p in theirs.values()] == [p.default for p in ours.values()]


@every_row
def test_the_proof_exists(row: Patch) -> None:
    path, _, name = row.proof.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]


@pytest.mark.parametrize("table", TABLES)
def test_every_target_has_one_row_and_a_reason(table: str) -> None:
    rows = TABLES[table]
    # A function may have a hook before it and one around it.
    assert len({(row.target, row.kind) for row in rows}) == len(rows)
    assert all(row.reason.endswith(".") for row in rows)
