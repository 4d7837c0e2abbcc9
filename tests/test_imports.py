"""Imports point one way, by the table in docs/architecture.md; files and functions stay small;
docstrings begin with a sentence or a noun phrase; names say what a value holds."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tests import ROOT

FILES = sorted((ROOT / "sglang_dflash").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
OTHERS = [
    path
    for folder in ("experiments", "tools", "launch", "tests", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
Node = TypeVar("Node", bound=ast.AST)
TORCH_FREE = ("common", "checkpoint", "memory", "patches", "tools/inspect", "tools/cli")
START = ("flags", "launch", "refused_settings", "server_flags", "unserved")
ADAPTER = ("plugin", "patches", "draft_weights.from_disk")
CLAUSE = re.compile(r"(Of|What|Whether|How|Which|Where|Why|Whose|When|Who)\b")
# Names that say nothing of a value, or what is done to it, or whose it is, and not what it holds;
# and the files in which `kind` is a documented field, or a parameter that SGLang names.
VAGUE = {
    "of", "some", "there", "here", "found", "one", "what", "kind",
    "keep", "kept", "known", "own", "seen", "written", "given", "asked", "made", "got", "took",
}  # fmt: skip
KINDS = (
    "sglang_dflash/patches/patch.py",
    "sglang_dflash/plugins/platform_cpu/platform.py",
    "sglang_dflash/tools/demo_pairs/pairs.py",
)


@functools.cache
def import_table() -> dict[str, set[str]]:
    """Package -> packages of ours that it may import, read from docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## Packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)` \|[^|]*\| ([^|]*) \|$", section, re.M)
    return {name: set(re.findall(r"`([\w/]+)`", allowed)) for name, allowed in rows}


def package_of(path: Path) -> str:
    """The row of the table that a file belongs to."""
    top, *parts = path.relative_to(ROOT).with_suffix("").parts
    return room_of(["dflash_kernels" if top == "kernels" else top, *parts])


def room_of(parts: list[str]) -> str:
    """The row of a dotted name of ours: of its folder in another one, or of its outermost one."""
    if parts[0] == "dflash_kernels":
        return parts[0]
    room = "/".join(parts[1:3])
    return room if room in import_table() else parts[1]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> tuple[ast.Module, list[ast.AST]]:
    """A file's tree, and all of its nodes."""
    tree = ast.parse(path.read_text())
    return tree, list(ast.walk(tree))


def nodes(path: Path, kind: type[Node]) -> Iterator[Node]:
    return (node for node in parsed(path)[1] if isinstance(node, kind))


def imported(path: Path) -> set[str]:
    names = {alias.name for node in nodes(path, ast.Import) for alias in node.names}
    for node in nodes(path, ast.ImportFrom):
        assert node.level == 0, f"{path}: relative import"
        names.add(node.module or "")
        names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


# Entry points, and the docstrings of folders that hold packages.
OUTSIDE = ("__init__", "__main__", "plugins", "tools")
PACKAGED = [path for path in FILES if package_of(path) not in OUTSIDE]


def test_the_table_names_every_package() -> None:
    assert set(import_table()) == {package_of(path) for path in PACKAGED}


def test_imports_point_one_way() -> None:
    table = import_table()
    refused = {}
    for path in PACKAGED:
        names, prefixes = imported(path), ("sglang_dflash.", "dflash_kernels")
        ours = {room_of(name.split(".")) for name in names if name.startswith(prefixes)}
        refused[name_of(path)] = ours - table[package_of(path)]
    assert not {path: names for path, names in refused.items() if names}


def test_the_product_imports_no_plugin_and_no_tool() -> None:
    beside = {name for name in import_table() if name.startswith(("plugins", "tools"))}
    for package in import_table().keys() - beside - {"benchmark"}:
        assert not import_table()[package] & beside


def module_of(path: Path) -> str:
    """The dotted name of a file of ours."""
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_no_file_imports_itself_through_others() -> None:
    """Imports for types only are counted too: who reads a file reads them."""
    left = {module_of(path).removeprefix("kernels."): imported(path) for path in FILES}
    while ends := {name for name, names in left.items() if not (names & left.keys())}:
        left = {name: names for name, names in left.items() if name not in ends}
    assert not left


def test_drafting_needs_no_engine() -> None:
    # checkpoint/hub.py asks the hub; nothing else in these packages leaves the machine.
    # common/machine.py asks torch for the accelerator, where torch is installed.
    allowed = {
        "common": {"torch", "tqdm"},
        "checkpoint": {"safetensors", "huggingface_hub", "httpx", "numpy"},
        "memory": set(),
        "drafting": {"compressed_tensors", "safetensors", "torch", "transformers"},
    }
    standard = {"sglang_dflash", *sys.stdlib_module_names}
    files = [path for path in PACKAGED if package_of(path) in allowed]
    refused = {name_of(f): top_level(f) - allowed[package_of(f)] - standard for f in files}
    assert not {path: names for path, names in refused.items() if names}


def test_only_the_adapters_import_sglang() -> None:
    adapters = {package_of(path) for path in PACKAGED if "sglang" in top_level(path)}
    rooms = ("draft_weights", "kv_transfer", "metrics", "start", "step", "gpu", "hybrid")
    serving = {f"serving/{room}" for room in rooms}
    assert adapters <= {*serving, "plugins/repairs", "plugins/platform_cpu", "patches"}
    for room, importers in (
        ("step", {"batch", "sampling", "seeded_sampling"}),
        ("metrics", {"labels"}),
    ):
        paths = [path for path in PACKAGED if package_of(path) == f"serving/{room}"]
        assert {path.stem for path in paths if "sglang" in top_level(path)} == importers


def test_torch_free_packages_load_without_torch() -> None:
    """Every SGLang process runs the plugin, and every shell completion the CLI."""
    modules = [
        module_of(path)
        for path in PACKAGED
        if package_of(path) in TORCH_FREE and path.stem != "__main__"
    ]
    modules += [f"sglang_dflash.serving.{name}" for name in ADAPTER]
    modules += [f"sglang_dflash.serving.start.{name}" for name in START]
    modules += [f"sglang_dflash.plugins.repairs.{name}" for name in ("plugin", "patches")]
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        "found = {'torch', 'sglang', 'transformers'} & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_stay_small() -> None:
    paths = [*FILES, *OTHERS]
    long_files = [name_of(f) for f in paths if len(f.read_text().splitlines()) > 400]
    functions = [
        (path, node)
        for path in paths
        for node in parsed(path)[1]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long_functions = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path, node in functions
        if (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not long_files and not long_functions


def test_docstrings_begin_with_a_sentence_or_a_noun() -> None:
    """Refuse clauses whose head the reader has to supply, such as "Whether it is live"."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    assert not [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)}"
        for path in (*FILES, *OTHERS)
        for node in parsed(path)[1]
        if isinstance(node, documented) and CLAUSE.match(ast.get_docstring(node) or "")
    ]


def is_vague(node: ast.AST, path: Path) -> bool:
    """A parameter, variable or attribute that a reader has to look up."""
    name = ""
    if isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(getattr(node, "ctx", None), ast.Store):
        name = getattr(node, "id", "") or getattr(node, "attr", "")
    name = name.lstrip("_")
    return name in VAGUE and not (name == "kind" and name_of(path) in KINDS)


def test_names_say_what_a_value_holds() -> None:
    assert not [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)}"
        for path in (*FILES, *OTHERS)
        if not name_of(path).startswith("tests/")
        for node in parsed(path)[1]
        if is_vague(node, path)
    ]


def is_stateless(target: ast.expr, value: ast.expr | None) -> bool:
    """An assignment that defines a constant, a type, a logger or a name like `__all__`."""
    name = ast.unparse(target)
    return (
        name.lstrip("_").isupper()
        or name == "logger"
        or (name.startswith("__") and name.endswith("__"))
        or isinstance(value, ast.Subscript | ast.BinOp)
    )


def test_modules_hold_no_state() -> None:
    """Module-level names are constants, types, loggers and functions; none is rebound later."""
    found = [f"{name_of(f)}:{node.lineno}" for f in FILES for node in nodes(f, ast.Global)]
    for path in FILES:
        for node in parsed(path)[0].body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            value = getattr(node, "value", None)
            state = [target for target in targets if not is_stateless(target, value)]
            found += [f"{name_of(path)}:{target.lineno}" for target in state]
    assert not found


def test_no_assert_instead_of_a_type() -> None:
    assert not [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path, ast.Assert)
        if "is not None" in ast.unparse(node.test)
    ]
