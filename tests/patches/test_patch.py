"""Rows of a patches table: what is refused, what composes, and what a second install does."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType, _format_source

from sglang_dflash.patches.patch import (
    Kind,
    LazyImport,
    Patch,
    PatchError,
    any_in_place,
    check,
    check_ahead,
    install,
    install_late,
    is_loaded,
    load_plugins,
    verify,
)

# The package that is patched, and a plugin that patches it without SGLang's registry.
HOME = """
import contextlib, functools, torch
from home.other import borrowed

def plain(x): return x + 1
def spare(x): return -x

@torch.no_grad()
def no_grad(x): return x

@contextlib.contextmanager
def context(x): yield x

@functools.lru_cache
def cached(x): return x

partial = functools.partial(plain, 1)
names = ["one"]
nothing = None

class Base:
    def inherited(self): return 1

class Worker(Base):
    def method(self, x): return x + 1
    @classmethod
    def of_class(cls, x): return x + 1
    @staticmethod
    def static(x): return x + 1
    kind = Base
    @property
    def size(self): return 1

Worker.assigned = borrowed
"""
FOREIGN = """
import functools
from home.mod import plain

def bare(*args): return 0

@functools.wraps(plain)
def wrapping(*args): return plain(*args)

partial = functools.partial(bare, 0)

class Callable:
    def __call__(self, *args): return 0

instance = Callable()
"""
TARGET, METHOD = "home.mod.plain", "home.mod.Worker.method"
OTHER = HookSource("rival", "rival-dist")


def module(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(source, made.__dict__)
    return made


@pytest.fixture(autouse=True)
def mod(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package to patch, and a registry without the hooks of other tests."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    package = module("home", "__path__ = []", monkeypatch)
    package.__dict__["other"] = module("home.other", "def borrowed(x): return x", monkeypatch)
    package.__dict__["mod"] = module("home.mod", HOME, monkeypatch)
    return package.mod


@pytest.fixture
def foreign(mod: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("rival_plugin", FOREIGN, monkeypatch)


def patch(target: str, kind: Kind, ours: Any) -> Patch:
    return Patch(target, kind, ours, "it would do something else.", "tests/x.py::y")


def doubled(original: Callable[[int], int], x: int) -> int:
    return 2 * original(x)


def tenfold(x: int) -> int:
    return 10 * x


def refused(row: Patch) -> str:
    """The message with which the row is refused; nothing is registered or assigned."""
    with pytest.raises(PatchError) as error:
        install([patch("home.mod.spare", Kind.REPLACE, tenfold), row])
    assert "home.mod.spare" not in HookRegistry._hooks
    assert isinstance(error.value, SystemExit) and not isinstance(error.value, Exception)
    message = error.value.code
    assert isinstance(message, str) and str(error.value) == message
    assert row.target in message and row.reason in message
    assert "docs/upgrading-sglang.md" in message
    return message


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)
def test_a_target_that_is_missing_or_no_function_is_refused(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_device.py").write_text("raise RuntimeError('no device')")
    monkeypatch.syspath_prepend(tmp_path)
    missing = ("mod.missing", "mod.Worker.missing", "missing.plain")
    for target in (*(f"home.{name}" for name in missing), "missing.plain", "plain"):
        assert "cannot resolve it" in refused(patch(target, kind, doubled))
    assert "no device" in refused(patch("needs_a_device.run", kind, tenfold))
    wanted = "property" if kind is Kind.PROPERTY else "function"
    if kind is not Kind.ASSIGN:
        assert f"expected a {wanted}, found a list" in refused(
            patch("home.mod.names", kind, doubled)
        )
    if kind.is_hook and kind is not Kind.REPLACE:
        assert "a class" in refused(patch("home.mod.Worker", kind, doubled))


@pytest.mark.parametrize("theirs", [HookType.AROUND, HookType.REPLACE], ids=lambda t: t.value)
@pytest.mark.parametrize("ours", [Kind.AROUND, Kind.REPLACE], ids=lambda kind: kind.value)
def test_two_that_decide_about_a_call_are_refused(ours: Kind, theirs: HookType) -> None:
    def rival(*args: Any) -> int:
        return 0

    HookRegistry.register(TARGET, rival, theirs, source=OTHER)
    message = refused(patch(TARGET, ours, doubled))
    assert "rival" in message and "plugin=rival, dist=rival-dist" in message


def test_before_and_after_hooks_of_others_compose(mod: ModuleType) -> None:
    def before(x: int) -> tuple[tuple[int], dict[str, int]]:
        return (x + 100,), {}

    def after(result: int, worker: Any, x: int) -> int:
        return result + 1000

    HookRegistry.register(TARGET, before, HookType.BEFORE, source=OTHER)
    HookRegistry.register(METHOD, after, HookType.AFTER, source=OTHER)
    install([patch(TARGET, Kind.REPLACE, tenfold), patch(METHOD, Kind.AROUND, around_method)])
    HookRegistry.apply_hooks()
    assert mod.plain(1) == 1010
    # The one that is registered first is the inner one.
    assert mod.Worker().method(1) == 2 * (2 + 1000)


def around_method(original: Any, self: Any, x: int) -> int:
    return 2 * original(self, x)


@pytest.mark.parametrize("theirs", [HookType.AROUND, HookType.REPLACE], ids=lambda t: t.value)
def test_ours_before_and_after_compose(theirs: HookType, mod: ModuleType) -> None:
    rival = doubled if theirs is HookType.AROUND else tenfold
    HookRegistry.register(TARGET, rival, theirs, source=OTHER)
    install([patch(TARGET, Kind.AFTER, lambda result, x: result + 1)])
    HookRegistry.apply_hooks()
    assert mod.plain(1) == (5 if theirs is HookType.AROUND else 11)


@pytest.mark.parametrize("name", ["bare", "wrapping", "partial", "instance", "Callable"])
@pytest.mark.parametrize("kind", [Kind.AFTER, Kind.AROUND, Kind.REPLACE, Kind.ASSIGN])
@pytest.mark.parametrize("target", ["plain", "Worker.method", "Worker.of_class", "Worker.static"])
def test_a_direct_assignment_by_another_is_refused(
    target: str, kind: Kind, name: str, mod: ModuleType, foreign: ModuleType
) -> None:
    theirs = getattr(foreign, name)
    if target == "Worker.of_class":
        theirs = classmethod(theirs)
    if target == "Worker.static":
        theirs = staticmethod(theirs)
    holder, _, attribute = f"mod.{target}".rpartition(".")
    setattr(mod.Worker if "Worker" in holder else mod, attribute, theirs)
    message = refused(patch(f"home.mod.{target}", kind, doubled))
    assert "already changed by" in message or "a class" in message
    if "already changed by" in message:
        assert "defined in rival_plugin" in message


@pytest.mark.parametrize("target", [
    TARGET, METHOD, "home.mod.no_grad", "home.mod.context", "home.mod.cached", "home.mod.partial",
    "home.mod.borrowed", "home.mod.Worker.assigned", "home.mod.Worker.inherited",
    "home.mod.Worker.of_class", "home.mod.Worker.static", "torch.Tensor.add", "torch.Tensor.split",
    "torch.nn.functional.linear", "torch.optim.SGD.step",
])  # fmt: skip
def test_what_its_own_package_defines_is_accepted(target: str) -> None:
    for kind in (Kind.BEFORE, Kind.AFTER, Kind.AROUND, Kind.REPLACE, Kind.ASSIGN):
        check(patch(target, kind, doubled))


@pytest.mark.parametrize("kind", [Kind.BEFORE, Kind.AFTER, Kind.AROUND, Kind.REPLACE])
def test_a_target_whose_hooks_are_applied_is_refused(kind: Kind) -> None:
    """SGLang's registry applies the hooks of a target once, and drops later ones silently."""
    HookRegistry.register(TARGET, lambda x: None, HookType.BEFORE, source=OTHER)
    HookRegistry.apply_hooks()
    message = refused(patch(TARGET, kind, doubled))
    assert "plugin=rival" in message and "only once" in message


def test_a_hook_that_is_no_longer_registered_is_found(mod: ModuleType) -> None:
    HookRegistry.register(TARGET, tenfold, HookType.REPLACE, source=OTHER)
    HookRegistry.apply_hooks()
    HookRegistry.reset()
    assert "hook_registry" in refused(patch(TARGET, Kind.REPLACE, doubled))
    assert "hook_registry" in refused(patch(TARGET, Kind.ASSIGN, doubled))


def table() -> tuple[Patch, ...]:
    return (
        patch(TARGET, Kind.REPLACE, tenfold),
        patch(METHOD, Kind.AROUND, around_method),
        patch("home.mod.Worker.of_class", Kind.AFTER, "operator:add"),
        patch("home.mod.spare", Kind.BEFORE, "operator:neg"),
        patch("home.mod.no_grad", Kind.ASSIGN, tenfold),
        patch("home.mod.Worker.static", Kind.ASSIGN, staticmethod(tenfold)),
        patch("home.mod.names", Kind.ASSIGN, "operator:neg"),
        patch("home.mod.Worker.kind", Kind.ASSIGN, "operator:add"),
        patch("home.mod.Worker.size", Kind.PROPERTY, "operator:truth"),
    )


@pytest.mark.parametrize("applied", [False, True], ids=["registered", "applied"])
def test_a_second_install_changes_nothing(applied: bool, mod: ModuleType) -> None:
    rows = table()
    install(rows)
    if applied:
        HookRegistry.apply_hooks()
    before = {name: getattr(mod, name) for name in ("plain", "no_grad", "names")}
    install(rows)
    # A table that is built anew has other objects for the same `MODULE:NAME`.
    install([row for row in table() if isinstance(row.ours, str)])
    HookRegistry.apply_hooks()
    assert all(len(hooks) == 1 for hooks in HookRegistry._hooks.values())
    assert len(HookRegistry._hooks) == 4
    # A lazy function is not bound to the class that holds it.
    assert mod.names(2) == -2 and mod.Worker.kind(2, 3) == mod.Worker().kind(2, 3) == 5
    if applied:
        assert before == {name: getattr(mod, name) for name in before}
    assert mod.plain(2) == 20 and mod.Worker().method(1) == 4
    verify(rows)


def test_a_late_install_is_applied_at_once(
    mod: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in one line, with our name in SGLang's registry. There was a line of SGLang's for
    each hook, which ended with "(from: unknown)"."""
    HookRegistry.register(METHOD, lambda result, self, x: None, HookType.AFTER, source=OTHER)
    HookRegistry.apply_hooks()
    caplog.set_level("INFO")
    # SGLang's own line, where another test has left its log at this level.
    caplog.clear()
    rows = table()[:1]
    install_late(rows, "a test")
    assert mod.plain(2) == 20
    assert caplog.messages == ["sglang-dflash: 1 changes to SGLang for a test"]
    ((_, _, source),) = HookRegistry._hooks[rows[0].target]
    assert _format_source(source) == "plugin=dflash, dist=sglang-dflash"
    install_late(rows, "a test")
    with pytest.raises(PatchError, match="plugin=rival"):
        install_late([patch(METHOD, Kind.AFTER, around_method)], "a test")


def test_a_hook_that_the_registry_fails_to_apply_is_found(mod: ModuleType) -> None:
    """The registry only logs it."""

    class Frozen(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("frozen")

    source = "class Sealed(metaclass=metaclass):\n    def method(self): return 1"
    exec(source, mod.__dict__ | {"metaclass": Frozen}, mod.__dict__)
    with pytest.raises(PatchError, match=r"Sealed\.method.*SGLang did not apply the hook"):
        install_late([patch("home.mod.Sealed.method", Kind.REPLACE, tenfold)], "a test")
    with pytest.raises(PatchError, match=r"Sealed\.method.*frozen"):
        install([patch("home.mod.Sealed.method", Kind.ASSIGN, tenfold)])


def test_a_property_is_computed_by_ours(mod: ModuleType, foreign: ModuleType) -> None:
    row = patch("home.mod.Worker.size", Kind.PROPERTY, "operator:truth")
    install([row])
    assert mod.Worker().size is True
    mod.Worker.size = property(foreign.bare)
    with pytest.raises(PatchError, match=r"Worker\.size.*overwritten"):
        verify([row])
    assert "already changed by" in refused(row)


def test_changes_after_ours_are_found(mod: ModuleType, foreign: ModuleType) -> None:
    rows = table()
    install(rows)
    with pytest.raises(PatchError, match="did not apply"):
        verify(rows)
    HookRegistry.register(TARGET, foreign.bare, HookType.REPLACE, source=OTHER)
    HookRegistry.apply_hooks()
    with pytest.raises(PatchError, match=r"home\.mod\.plain.*rival_plugin:bare.*plugin=rival"):
        verify(rows)
    mod.__dict__["no_grad"] = foreign.bare
    with pytest.raises(PatchError, match=r"home\.mod\.no_grad.*overwritten"):
        verify(rows[4:])


def test_a_lazy_function_is_imported_when_it_is_first_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LazyImport("rival_plugin:bare")
    assert late == LazyImport("rival_plugin:bare") != LazyImport("rival_plugin:wrapping")
    with pytest.raises(ModuleNotFoundError):
        late()
    add = LazyImport("operator:add")
    assert add(1, 2) == 3
    # It is looked up once.
    monkeypatch.delattr(operator, "add")
    assert add(1, 3) == 4


def test_what_fails_at_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import plugins

    for error, told in [
        (PatchError("cannot apply the patch"), "cannot apply the patch"),
        (ImportError("no libcuda"), "ImportError: no libcuda"),
    ]:

        def fail(error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(plugins, "load_plugins", fail)
        assert load_plugins() == (None, told)


def test_it_is_known_whether_a_plugin_has_run(mod: ModuleType) -> None:
    absent = patch("home.missing.name", Kind.ASSIGN, doubled)
    rows = [absent, patch(TARGET, Kind.AROUND, doubled)]
    assert not any_in_place(rows)
    install_late(rows[1:], "a test")
    assert any_in_place(rows) and not any_in_place([absent])


def test_it_is_known_which_plugin_has_hooks(mod: ModuleType) -> None:
    HookRegistry.register(METHOD, doubled, HookType.BEFORE)  # Of no plugin.
    assert not is_loaded("rival")
    HookRegistry.register(TARGET, doubled, HookType.BEFORE, source=OTHER)
    assert is_loaded("rival") and not is_loaded("rival-dist")


def test_late_rows_that_another_plugin_of_ours_has_installed_are_skipped(mod: ModuleType) -> None:
    """The worker's are, beside the repairs: a target's hooks are applied once."""
    shared, own = patch(TARGET, Kind.AROUND, doubled), patch(METHOD, Kind.AROUND, doubled)
    install([shared])
    HookRegistry.apply_hooks()
    install_late([shared, own], "a test")
    assert len(HookRegistry._hooks[TARGET]) == len(HookRegistry._hooks[METHOD]) == 1
    assert mod.plain(3) == 8


def test_rows_are_checked_ahead_of_their_install(mod: ModuleType) -> None:
    shared, own = patch(TARGET, Kind.AROUND, doubled), patch(METHOD, Kind.AROUND, doubled)
    install([shared])
    assert check_ahead([shared, own]) == [own] and METHOD not in HookRegistry._hooks
    with pytest.raises(PatchError, match=r"home\.mod\.missing"):
        check_ahead([own, patch("home.mod.missing", Kind.AROUND, doubled)])
