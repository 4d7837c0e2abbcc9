"""Imports point one way: core <- dflash_kernels <- serving, platform_cpu, transformers <- bench, cli; facts <- inspection <- cli."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "sglang_dflash").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
LIMITS = {
    # what a part of the house may import of the house
    "config": set(),
    "core": {"config", "core"},
    "dflash_kernels": {"config", "core", "dflash_kernels"},
    "transformers": {"config", "core", "dflash_kernels"},
    "request": {"config"},
    "hub": {"config"},
    "generate": {"config", "core", "hub", "request", "transformers"},
    "platform_cpu": {"config", "core", "dflash_kernels", "platform_cpu"},
    "serving": {"config", "core", "dflash_kernels", "hub", "platform_cpu", "serving"},
    "facts": {"config", "facts"},
    "description": {"config", "facts"},
    "inspection": {"config", "facts", "description"},
    "models": {"config", "facts", "description", "inspection"},
    "bench": {"config", "core", "dflash_kernels", "transformers", "bench"},
    "cli": {
        "config",
        "core",
        "dflash_kernels",
        "transformers",
        "bench",
        "facts",
        "inspection",
        "request",
        "generate",
        "cli",
    },
}


def part_of(path: Path) -> str:
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


@pytest.mark.parametrize(
    "path",
    [f for f in FILES if part_of(f) != "__init__"],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_imports_point_one_way(path: Path) -> None:
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("sglang_dflash.")}
    ours |= {"dflash_kernels" for name in imported(path) if name.split(".")[0] == "dflash_kernels"}
    assert ours <= LIMITS[part_of(path)]


@pytest.mark.parametrize(
    "path",
    [f for f in FILES if part_of(f) in ("core", "config")],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_core_needs_torch_and_safetensors_only(path: Path) -> None:
    allowed = {"torch", "safetensors", "sglang_dflash", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imported(path)} <= allowed


def test_plugin_and_flags_import_no_model_code() -> None:
    """Every SGLang process runs the plugin, `--help` included: it may not pull in torch code of ours or the worker."""
    code = (
        "import sys, sglang_dflash.serving.plugin, sglang_dflash.serving.arguments, sglang_dflash.serving.memory;"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"
