"""The table of seams: every target exists, takes our arguments, and has a proof."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.platform_cpu.seams import GDN_SEAMS, SEAMS
from sglang_dflash.seam.seam import REGISTRY, Kind, Seam, describe

ROOT = Path(__file__).parents[2]
HOOKS = [row for row in SEAMS if row.kind.is_hook]
# torch does not publish the arguments of these.
ASSIGNED = {
    "torch.Tensor.record_stream": lambda self, stream: None,
    "torch.Tensor.pin_memory": lambda self, device=None: None,
}
# What a hook is given before the arguments of its target.
GIVEN_FIRST = {Kind.BEFORE: 0, Kind.AFTER: 1, Kind.AROUND: 1, Kind.REPLACE: 0}


def target_of(row: Seam) -> str:
    return row.target


def original(row: Seam) -> Callable[..., Any]:
    function = pkgutil.resolve_name(row.target)
    while getattr(function, "__globals__", {}).get("__name__") == REGISTRY:
        function = function.__wrapped__
    return ASSIGNED.get(row.target, function)


def takes_all(ours: Callable[..., Any], theirs: Callable[..., Any], given_first: int) -> None:
    """Bind every argument of `theirs` to `ours`, by position and, past `self`, by name."""
    parameters = list(inspect.signature(theirs).parameters.values())
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    either = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [object()] * given_first
    mine = inspect.signature(ours)
    mine.bind(*first, *either, **dict.fromkeys(named))
    this = either[:1] if either[:1] == ["self"] else []
    mine.bind(*first, *this, **dict.fromkeys([*either[len(this) :], *named]))


@pytest.mark.parametrize("row", SEAMS, ids=target_of)
def test_the_target_exists(row: Seam) -> None:
    assert pkgutil.resolve_name(row.target) is not None


@pytest.mark.parametrize("row", [r for r in SEAMS if r.kind is not Kind.EXTEND], ids=target_of)
def test_ours_takes_the_arguments_of_the_target(row: Seam) -> None:
    takes_all(row.ours, original(row), GIVEN_FIRST.get(row.kind, 0))


@pytest.mark.parametrize("row", GDN_SEAMS, ids=target_of)
def test_names_and_defaults_are_those_of_the_target(row: Seam) -> None:
    theirs, ours = (inspect.signature(f).parameters for f in (original(row), row.ours))
    assert list(theirs) == list(ours)
    assert [p.default for p in theirs.values()] == [p.default for p in ours.values()]


@pytest.mark.parametrize("row", SEAMS, ids=target_of)
def test_the_proof_exists(row: Seam) -> None:
    path, _, name = row.proof.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name.partition("[")[0] in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]


def test_every_target_has_one_row_and_a_reason() -> None:
    described = describe(SEAMS)
    assert len({row["target"] for row in described}) == len(described) == len(SEAMS)
    assert all(row["reason"].endswith(".") for row in described)
