"""One change to SGLang or torch: what is changed, by what, why, and what shows that it is needed.

A seams table (`serving/seams.py`, `platform_cpu/seams.py`) is a tuple of rows. `install` checks
every row before it touches anything: a target that is gone, or that something else has changed
already, ends the process with a message that names the row. SGLang logs and swallows exceptions
of a plugin, and would go on without us, so `SeamError` derives from `SystemExit`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class SeamError(SystemExit):
    """A row cannot be applied. The message names it."""


class Kind(Enum):
    """How a row changes its target.

    The first four are SGLang's hook types (`sglang.srt.plugins.hook_registry.HookType`). ASSIGN
    sets an attribute to `ours`, WRAP to `ours(current value)`. EXTEND appends to a list.
    """

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    ASSIGN = "assign"
    WRAP = "wrap"
    EXTEND = "extend"


@dataclass(frozen=True)
class Seam:
    """One row.

    Attributes:
        target: dotted path of the function, method, attribute or list.
        kind: how it is changed.
        ours: the function or value; `MODULE:NAME` is imported on the first call.
        reason: what SGLang does without it.
        proof: the test (`tests/...::name`) that fails without the row, or that says why none can.
        only_if_loaded: skip the row unless this module is imported already in this process.
    """

    target: str
    kind: Kind
    ours: Any
    reason: str
    proof: str
    only_if_loaded: str | None = None

    @property
    def parent(self) -> str:
        """Dotted path of the module or class that holds the target."""
        return self.target.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        return self.target.rpartition(".")[2]

    def function(self) -> Any:
        """`ours`, imported if it is a `MODULE:NAME` string of a hook."""
        if isinstance(self.ours, str) and self.kind not in (Kind.ASSIGN, Kind.EXTEND, Kind.WRAP):
            return lazy(self.ours)
        return self.ours


def lazy(path: str) -> Callable[..., Any]:
    """A function that imports `MODULE:NAME` when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return pkgutil.resolve_name(path)(*args, **kwargs)

    call.__qualname__ = call.__name__ = path
    return call


def install(rows: Iterable[Seam]) -> None:
    """Check all rows, then apply them: hooks through SGLang's registry, the rest directly.

    Raises:
        SeamError: a target does not exist, or something else has changed it.
    """
    rows = [row for row in rows if row.only_if_loaded in (None, *sys.modules)]
    for row in rows:
        check(row)
    for row in rows:
        _apply(row)


def install_late(rows: Iterable[Seam]) -> None:
    """`install` after SGLang has applied the hooks of all plugins: apply ours at once.

    Raises:
        SeamError: as `install`, or SGLang failed to apply a hook.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    rows = list(rows)
    install(rows)
    HookRegistry.apply_hooks()
    for row in rows:
        if row.target not in HookRegistry._patched:
            raise SeamError(f"sglang-dflash: seam {row.target}: SGLang failed to apply it")


def check(row: Seam) -> None:
    """Raise SeamError unless the row's target exists and is as its module defined it."""
    if len(row.target.split(".")) < 2:
        raise SeamError(f"sglang-dflash: seam {row.target}: not a dotted path")
    try:
        holder = pkgutil.resolve_name(row.parent)
        current = _raw(holder, row.attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SeamError(
            f"sglang-dflash: seam {row.target} ({row.kind.value}): no such name in this SGLang "
            f"({error}). It is there because: {row.reason} See docs/upgrading-sglang.md"
        ) from error
    patched = _patched_by(row, holder, current)
    if patched is not None:
        raise SeamError(
            f"sglang-dflash: seam {row.target} ({row.kind.value}): already changed by {patched}. "
            "Two changes of one place are not combined; disable one of the two plugins"
        )


def _raw(holder: Any, attribute: str) -> Any:
    """The attribute as it is stored, descriptors included. Raises AttributeError."""
    if isinstance(holder, type):
        for base in holder.__mro__:
            if attribute in vars(base):
                return vars(base)[attribute]
    return getattr(holder, attribute)


def _patched_by(row: Seam, holder: Any, current: Any) -> str | None:
    """Who has changed the target before us, or None."""
    if row.kind is Kind.EXTEND:
        if not isinstance(current, list):
            return f"its type, {type(current).__name__}, which is not a list"
        return "an entry of the same name" if row.ours in current else None
    # Hooks before and after compose; two that decide about the call itself do not.
    hooks = _registered(row.target)
    if row.kind in (Kind.AROUND, Kind.REPLACE):
        others = [source for kind, source in hooks if kind in ("around", "replace")]
        if others:
            return f"a hook of {others[0]}"
    function = getattr(current, "__func__", current)
    module = getattr(function, "__module__", None)
    home = holder.__module__ if isinstance(holder, type) else getattr(holder, "__name__", None)
    defined_elsewhere = callable(function) and module is not None and module != home
    if (
        row.kind not in (Kind.ASSIGN, Kind.WRAP)
        and defined_elsewhere
        and not isinstance(holder, type)
    ):
        return f"{module}.{getattr(function, '__qualname__', '?')}"
    return None


def _registered(target: str) -> list[tuple[str, str]]:
    """Kind and source of every hook that SGLang's registry holds for the target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, _format_source

    # `_hooks` is a defaultdict: reading a missing key would add it.
    known = HookRegistry._hooks.get(target, [])
    return [(kind.value, _format_source(source)) for kind, _hook, source in known]


def _apply(row: Seam) -> None:
    if row.kind is Kind.ASSIGN:
        setattr(pkgutil.resolve_name(row.parent), row.attribute, row.ours)
    elif row.kind is Kind.WRAP:
        holder = pkgutil.resolve_name(row.parent)
        setattr(holder, row.attribute, row.ours(getattr(holder, row.attribute)))
    elif row.kind is Kind.EXTEND:
        pkgutil.resolve_name(row.target).append(row.ours)
    else:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(row.target, row.function(), HookType(row.kind.value))
