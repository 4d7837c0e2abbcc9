"""Imports point one way, by the table in docs/architecture.md; files and functions stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "sglang_dflash").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
OTHERS = [
    path
    for folder in ("benchmarks", "tools", "launch", "tests", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TORCH_FREE = ("checkpoint", "inspect_pair", "doctor", "plugin", "cli")


def import_table() -> dict[str, set[str]]:
    """Package -> packages of ours that it may import, read from docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## Packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", section, re.M)
    return {name: set(re.findall(r"`(\w+)`", allowed)) for name, allowed in rows}


def package_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "kernels":
        return "dflash_kernels"
    return relative.parts[1].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PACKAGED = [path for path in FILES if package_of(path) not in ("__init__", "__main__")]


def test_the_table_names_every_package() -> None:
    assert set(import_table()) == {package_of(path) for path in PACKAGED}


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    names = imported(path)
    ours = {name.split(".")[1] for name in names if name.startswith("sglang_dflash.")}
    ours |= {"dflash_kernels" for name in names if name.split(".")[0] == "dflash_kernels"}
    assert ours <= import_table()[package_of(path)]


@pytest.mark.parametrize(
    "path", [f for f in PACKAGED if package_of(f) in ("core", "checkpoint")], ids=name_of
)
def test_core_needs_no_engine(path: Path) -> None:
    allowed = {"sglang_dflash", *sys.stdlib_module_names}
    # checkpoint/hub.py asks the hub; nothing else in these packages leaves the machine.
    hub = {"huggingface_hub", "httpx", "numpy"}
    allowed |= {"safetensors", *(hub if package_of(path) == "checkpoint" else {"torch", "numpy"})}
    assert {name.split(".")[0] for name in imported(path)} <= allowed


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_only_the_adapters_import_sglang(path: Path) -> None:
    if package_of(path) not in ("serving", "platform_cpu", "plugin"):
        assert "sglang" not in {name.split(".")[0] for name in imported(path)}


def test_torch_free_packages_load_without_torch() -> None:
    """Every SGLang process runs the plugin, and every shell completion the CLI."""
    modules = [
        name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in PACKAGED
        if package_of(path) in TORCH_FREE and path.stem != "__main__"
    ]
    modules += [f"sglang_dflash.serving.{name}" for name in ("plugin", "seams", "arguments")]
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        "found = {'torch', 'sglang', 'transformers'} & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", [*FILES, *OTHERS], ids=name_of)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_hold_no_state(path: Path) -> None:
    """Module-level names are constants, types, loggers and functions; none is rebound later."""
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            name = ast.unparse(target)
            is_type_alias = isinstance(getattr(node, "value", None), ast.Subscript | ast.BinOp)
            is_constant = name.isupper() or name.lstrip("_").isupper()
            dunder = name.startswith("__") and name.endswith("__")
            assert is_constant or name == "logger" or dunder or is_type_alias, f"{name} = ..."


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_assert_instead_of_a_type(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            assert "is not None" not in ast.unparse(node.test), f"line {node.lineno}"
