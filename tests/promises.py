"""The index in tests/README.md: where each promise is tested, and the subject of each file.

    python -m tests.promises [--check]

writes it, below its marker, from the bugs in tests/reliability/mutations.toml, the proofs in the
tables of patches, the runs in docs/reliability.md, and the docstrings of the tests' modules.
`--check` writes nothing; the exit status is 1 if the page would change.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from launch.mutate import LIST, read_list
from sglang_dflash.patches.patch import Patch
from sglang_dflash.plugins.platform_cpu import patches as platform_cpu
from sglang_dflash.plugins.repairs import patches as repairs
from sglang_dflash.serving import patches as serving
from tests import ROOT

PAGE, ENGINE = ROOT / "tests/README.md", ROOT / "tests/engine"
MARKER = "<!-- Below: written by `python -m tests.promises`. -->\n"
# Rows that the repairs share with our worker count as the worker's.
PATCHES = (
    *serving.PATCHES, *serving.WORKER_PATCHES, *serving.BUILTIN_PATCHES, *serving.REPLAY_PATCHES,
    *(row for row in repairs.PATCHES if row not in serving.SAMPLING_PATCHES),
    *platform_cpu.PATCHES,
)  # fmt: skip


def home_of(row: Patch) -> str:
    """The folder of the module that has our function, as `serving/step`."""
    if not isinstance(row.ours, str):
        return "plugins/platform_cpu" if row in platform_cpu.PATCHES else "plugins/repairs"
    module = row.ours.partition(":")[0]
    return module.rpartition(".")[0].removeprefix("sglang_dflash.").replace(".", "/")


def owned() -> dict[str, dict[str, list[str]]]:
    """For each folder of the package, its tests, each with what makes it fail."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for bug in read_list(ROOT / LIST):
        path = Path(bug.file)
        folder = path.parent.as_posix().removeprefix("sglang_dflash/")
        for test in bug.tests:
            found[folder][test.partition("[")[0]].append(f"`{bug.name}` in {path.name}")
    for row in PATCHES:
        target = ".".join(row.target.split(".")[-2:])
        found[home_of(row)][row.proof].append(f"no patch of `{target}`")
    return found


def promise_of(test: str) -> str:
    """The name of a test in words."""
    return test.partition("::test_")[2].replace("_", " ").capitalize()


def promises() -> Iterator[str]:
    for folder, tests in sorted(owned().items()):
        yield f"\n### {folder}\n\n| promise | test | fails with |\n|---|---|---|\n"
        for test, causes in sorted(tests.items()):
            file = test.partition("::")[0].removeprefix("tests/")
            yield f"| {promise_of(test)} | {file} | {', '.join(dict.fromkeys(causes))} |\n"


def runs() -> Iterator[str]:
    """The rows of docs/reliability.md whose command names tests."""
    yield "\n### Whole servers, by hand (docs/reliability.md)\n\n| run | command |\n|---|---|\n"
    page = (ROOT / "docs/reliability.md").read_text()
    for name, command in re.findall(r"^\| (.+?) \| (`[^`|]*tests/[^`|]*`) \|", page, re.M):
        yield f"| {name} | {command} |\n"


def requests() -> Iterator[str]:
    """The requests and checks that the table of test_exactness.py names."""
    yield "\n### Answers that are plain decoding's, and how drafts are proven to be in use\n\n"
    yield "| rows of engine/test_exactness.py ask or check | in |\n|---|---|\n"
    table = ast.parse((ENGINE / "test_exactness.py").read_text())
    modules = {
        name.asname or name.name: name.name
        for node in table.body
        if isinstance(node, ast.ImportFrom) and node.module == "tests.engine"
        for name in node.names
    }
    named = {
        (modules[node.value.id], node.attr)
        for node in ast.walk(table)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }
    for module in sorted(modules.values()):
        for node in ast.parse((ENGINE / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and (module, node.name) in named:
                told = summary(node).removesuffix(".")
                yield f"| `{node.name}`{told and ': '}{told} | {module}.py |\n"


def summary(node: ast.Module | ast.FunctionDef) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def files() -> Iterator[str]:
    """Every module below tests/, by folder, with the first line of its docstring."""
    folders = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name != "__init__.py":
            folders[path.parent.relative_to(ROOT).as_posix()].append(path)
    for folder, paths in sorted(folders.items()):
        yield f"\n### {folder}\n\n"
        for path in paths:
            yield f"- `{path.name}`: {summary(ast.parse(path.read_text()))}\n"


def page() -> str:
    """The page as it should be: what is above the marker stays."""
    above, _, _ = PAGE.read_text().partition(MARKER)
    parts = (*promises(), *requests(), *runs(), "\n## Files\n", *files())
    return above + MARKER + "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.promises")
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    text = page()
    if parser.parse_args().check:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
