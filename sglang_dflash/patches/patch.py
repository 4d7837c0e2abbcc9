"""One change to SGLang or torch: what changes, how, why, and which test shows the need.

A patches table (`serving`, `repairs` and `platform_cpu` have a `patches.py`) is a tuple of rows.

`install` checks every row before it applies the first. A target that is gone, or that another party
has changed, ends the process with a message that names the row: SGLang logs and swallows the
exceptions of a plugin and would run without us, so `PatchError` derives from `SystemExit`. Hooks go
through SGLang's registry, which applies them after all plugins have run; `verify` then finds what
it failed to apply.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_dflash.common.log import Log

logger = Log(__name__)
REGISTRY = "sglang.srt.plugins.hook_registry"
# Besides a target's own package, functions of these modules may wrap it: `torch.no_grad`,
# `torch._dynamo.disable`, `contextlib.contextmanager`.
DECORATORS = ("torch", "contextlib")


class PatchError(SystemExit):
    """A row cannot be applied. Ends the process with status 1 and prints its message."""


class Kind(Enum):
    """The way in which a row changes its target.

    The first four are SGLang's hook types (`sglang.srt.plugins.hook_registry.HookType`). ASSIGN
    sets an attribute, PROPERTY a property of a class, which our function computes.
    """

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    ASSIGN = "assign"
    PROPERTY = "property"

    @property
    def is_hook(self) -> bool:
        return self not in (Kind.ASSIGN, Kind.PROPERTY)


@dataclass(frozen=True)
class Patch:
    """One row.

    Attributes:
        target: dotted path of the function, method or attribute.
        kind: how it is changed.
        ours: the function or value. Text is a function's `MODULE:NAME`, imported on its first call.
        reason: what SGLang does without it.
        proof: the test (`tests/...::name`) that fails without the row, or that explains why no
            test can.
    """

    target: str
    kind: Kind
    ours: Any
    reason: str
    proof: str

    @property
    def parent(self) -> str:
        """Dotted path of the module or class that holds the target."""
        return self.target.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        return self.target.rpartition(".")[2]

    @property
    def value(self) -> Any:
        """The value that is registered or assigned."""
        return LazyImport(self.ours) if isinstance(self.ours, str) else self.ours


def patch_rows(home: str, *table: tuple[Any, ...]) -> tuple[Patch, ...]:
    """Rows of functions of `sglang.srt`, each with its kind, its target there, the `MODULE:NAME` of
    ours in the package `home`, and the rest of `Patch`'s fields. No row imports anything."""
    return tuple(
        Patch(f"sglang.srt.{target}", kind, f"{home}.{ours}", *rest)
        for kind, target, ours, *rest in table
    )


@dataclass(frozen=True)
class LazyImport:
    """A function that imports `MODULE:NAME` when it is first called: some are called for each
    request of each step. Equal paths compare equal."""

    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return pkgutil.resolve_name(self.path)


def install(rows: Iterable[Patch]) -> None:
    """Check all rows, then apply them. Rows of ours that are in place already are skipped.

    Raises:
        PatchError: a target does not exist, or another party has changed it.
    """
    for row in check_ahead(rows):
        try:
            _apply(row)
        except Exception as error:
            raise _error(row, f"{type(error).__name__}: {error}") from error


def check_ahead(rows: Iterable[Patch]) -> list[Patch]:
    """Check rows that will be installed later, maybe in another process whose plugins are the same.

    Returns:
        Those that are not in place already.

    Raises:
        PatchError: as for `install`.
    """
    missing = [row for row in rows if not _in_place(row)]
    for row in missing:
        check(row)
    return missing


def install_late(rows: Iterable[Patch], purpose: str) -> None:
    """`install` in a process whose plugins are loaded: the hooks are applied at once.

    Args:
        purpose: they are for. The log gets one line of ours, in place of one of SGLang's for each.

    Raises:
        PatchError: as for `install`, or the registry did not apply a hook.
    """
    from sglang.srt.plugins import HookSource, _current_plugin_source
    from sglang.srt.plugins.hook_registry import HookRegistry

    rows = list(rows)
    theirs = logging.getLogger(REGISTRY)
    level, source = theirs.level, HookSource(plugin_name="dflash", dist_name="sglang-dflash")
    token = _current_plugin_source.set(source)
    try:
        install(rows)
        theirs.setLevel(logging.WARNING)
        HookRegistry.apply_hooks()
    finally:
        theirs.setLevel(level)
        _current_plugin_source.reset(token)
    verify(rows)
    logger.info("%d changes to SGLang for %s", len(rows), purpose)


def verify(rows: Iterable[Patch]) -> None:
    """Check that all rows are in place, once SGLang has applied the hooks.

    Finds hooks that the registry failed to apply, which it only logs, and changes by plugins that
    ran after us.

    Raises:
        PatchError: a hook is not applied, or another plugin decides about the same call.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for row in rows:
        if not _in_place(row):
            raise _error(row, "not installed, or overwritten afterwards")
        if row.kind.is_hook and row.target not in HookRegistry._patched:
            raise _error(row, "SGLang did not apply the hook; its log has the exception")
        _refuse_other_hooks(row)


def any_in_place(rows: Iterable[Patch]) -> bool:
    """Return whether the plugin that installs the rows has run in this process."""
    return any(map(_in_place, rows))


def is_loaded(plugin: str) -> bool:
    """Return whether the plugin of that name has hooks in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = (hook for target in HookRegistry._hooks.values() for hook in target)
    return any(source is not None and source.plugin_name == plugin for _, _, source in hooks)


def load_plugins() -> tuple[object | None, str | None]:
    """Load SGLang's plugins in this process, as a server does.

    Returns:
        SGLang's platform, and why a server of this installation would end at start, or None.
    """
    try:
        # What torch and SGLang warn of while they are imported would bury a report.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sglang.srt import platforms, plugins

            plugins.load_plugins()
    except PatchError as error:
        return None, str(error)
    except Exception as error:  # Importing SGLang and its kernels may fail in any way.
        return None, f"{type(error).__name__}: {error}"
    return platforms.current_platform, None


def check(row: Patch) -> None:
    """Raise PatchError unless the row's target exists and only its own package has defined it."""
    try:
        current = _current(row)
    except Exception as error:  # The import of the target's module may fail in any way.
        raise _error(row, f"cannot resolve it ({error})") from error
    if row.kind.is_hook:
        if not callable(_function(current)):
            raise _error(row, f"expected a function, found a {type(current).__name__}")
        if isinstance(current, type) and row.kind is not Kind.REPLACE:
            raise _error(row, "the target is a class; only kind replace works on a class")
        _refuse_other_hooks(row)
        _refuse_applied(row)
    elif row.kind is Kind.PROPERTY and not isinstance(current, property):
        raise _error(row, f"expected a property, found a {type(current).__name__}")
    package = row.target.partition(".")[0]
    for module in _defining_modules(current):
        if module == REGISTRY or module.partition(".")[0] not in (package, *DECORATORS):
            raise _error(row, f"already changed by {_name(current)}, defined in {module}")


def _error(row: Patch, problem: str) -> PatchError:
    return PatchError(
        f"sglang-dflash: cannot apply the patch {row.target} ({row.kind.value}): {problem}. "
        f"Without it: {row.reason} See docs/upgrading-sglang.md"
    )


def _current(row: Patch) -> Any:
    """The target as it is stored, descriptors included.

    Raises:
        ImportError, AttributeError, ValueError: there is no such name.
    """
    holder = pkgutil.resolve_name(row.parent)
    if isinstance(holder, type):
        for base in holder.__mro__:
            if row.attribute in vars(base):
                return vars(base)[row.attribute]
    return getattr(holder, row.attribute)


def _in_place(row: Patch) -> bool:
    """Return whether this row, and not an equal change by another plugin, was applied or
    registered."""
    if row.kind.is_hook:
        return (row.kind.value, row.value) in [(kind, hook) for kind, hook, _ in _hooks(row)]
    try:
        current = _current(row)
        return (current.fget if row.kind is Kind.PROPERTY else current) == row.value
    except Exception:  # `check` reports it.
        return False


def _hooks(row: Patch) -> list[tuple[str, Any, str]]:
    """Kind, hook and source of all hooks that SGLang's registry holds for the target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, _format_source

    # `_hooks` is a defaultdict: reading a missing key would add it.
    hooks = HookRegistry._hooks.get(row.target, [])
    return [(kind.value, hook, _format_source(source)) for kind, hook, source in hooks]


def _refuse_other_hooks(row: Patch) -> None:
    """Hooks before and after a call compose; two that decide about the call itself do not."""
    if row.kind not in (Kind.AROUND, Kind.REPLACE):
        return
    for kind, hook, source in _hooks(row):
        if kind in ("around", "replace") and hook != row.value:
            raise _error(row, f"already changed by {_name(hook)}, hook of {source}")


def _refuse_applied(row: Patch) -> None:
    """The registry applies the hooks of a target once: one that comes later is lost."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if row.target in HookRegistry._patched:
        others = ", ".join(f"{_name(hook)}, hook of {source}" for _, hook, source in _hooks(row))
        changed = f"already changed by {others or 'a hook'}"
        raise _error(row, f"{changed}, and SGLang applies hooks to a target only once")


def _function(value: Any) -> Any:
    """The function inside a classmethod or staticmethod, or the value itself."""
    return getattr(value, "__func__", value)


def _defining_modules(value: Any) -> Iterator[str]:
    """The modules that define a callable and everything that it wraps; none for plain data.

    `functools.wraps` copies `__module__`, so a function's globals are asked first.
    """
    value = _function(value)
    if isinstance(value, property):
        value = value.fget
    while callable(value):
        if isinstance(value, functools.partial):
            value = value.func
            continue
        defined_in = getattr(value, "__globals__", {}).get("__name__")
        owner = getattr(value, "__objclass__", value)  # Methods of C code name only their class.
        yield defined_in or getattr(owner, "__module__", None) or "builtins"
        value = getattr(value, "__wrapped__", None)


def _name(value: Any) -> str:
    """`MODULE:NAME` of a function or class, the text of anything else."""
    if isinstance(value, LazyImport):
        return value.path
    value = _function(value)
    value = value.func if isinstance(value, functools.partial) else value
    name = getattr(value, "__qualname__", None)
    return str(value) if name is None else f"{getattr(value, '__module__', '?')}:{name}"


def _apply(row: Patch) -> None:
    if not row.kind.is_hook:
        value = property(row.value) if row.kind is Kind.PROPERTY else row.value
        setattr(pkgutil.resolve_name(row.parent), row.attribute, value)
    else:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(row.target, row.value, HookType(row.kind.value))
