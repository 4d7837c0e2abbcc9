"""The list of bugs fits the tree, and `launch/mutate.py` tells a bug that is caught from one that
is not. To put them all back: `python launch/mutate.py`."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from launch.mutate import LIST, ROOT, Mutation, read_list, run

MUTATIONS = read_list(ROOT / LIST)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_bug_can_be_put_back(mutation: Mutation) -> None:
    """Its text is in the file once, and its tests exist."""
    text = (ROOT / mutation.file).read_text()
    changed = mutation.apply(text)
    assert changed != text
    ast.parse(changed)
    assert not mutation.file.startswith("tests/")
    for test in mutation.tests:
        path, _, name = test.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_the_docs_tell_how_many_there_are() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    blind = sum(mutation.chosen == "blind" for mutation in MUTATIONS)
    assert f"lists {len(MUTATIONS)} bugs, {blind} of them" in page
    assert f"| {len(MUTATIONS)} of {len(MUTATIONS)} caught" in page


TREE = {
    "double.py": "def double(x):\n    return 2 * x  # twice\n",
    "test_double.py": (
        "from double import double\n\n\ndef test_it():\n    assert double(2) == 4\n\n\n"
        "def test_nothing():\n    double(2)\n\n\n"
        "import pytest\n\n\n@pytest.mark.parametrize('x', [0, 2])\n"
        "def test_each(x):\n    assert double(x) == x + x\n"
    ),
}


def mutate(folder: Path, *bugs: str) -> int:
    for name, text in TREE.items():
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", folder], check=True)
    rows = [f'[[mutation]]\nchosen = "known"\nfile = "double.py"\n{bug}\n' for bug in bugs]
    (folder / "bugs.toml").write_text("".join(rows))
    return run(folder, read_list(folder / "bugs.toml"))


CAUGHT = 'name = "a"\nold = "2 * x"\nnew = "3 * x"\ntests = ["test_double.py::test_it"]'
# A process that dies is red in pytest, too.
DIES = (
    'name = "f"\nold = "return 2 * x"\nnew = "import os; os.abort()"\n'
    'tests = ["test_double.py::test_it"]'
)
HALF = (
    'name = "c"\nold = "2 * x"\nnew = "3 * x"\n'
    'tests = ["test_double.py::test_it", "test_double.py::test_nothing"]'
)
# Twice nothing is nothing.
EACH = [
    f'name = "g{x}"\nold = "2 * x"\nnew = "3 * x"\ntests = ["test_double.py::test_each[{x}]"]'
    for x in (2, 0)
]
GONE = 'name = "d"\nold = "4 * x"\nnew = "3 * x"\ntests = ["test_double.py::test_it"]'
# A file that cannot be imported makes no test red.
BAD = 'name = "e"\nold = "2 * x"\nnew = "2 *"\ntests = ["test_double.py::test_it"]'


def test_a_bug_is_caught_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate(tmp_path, CAUGHT, DIES, EACH[0], HALF, EACH[1], GONE, BAD) == 1
    shown = capsys.readouterr().out
    run_tests = [line.split()[0] for line in shown.splitlines()[:7]]
    assert run_tests == ["killed"] * 3 + ["SURVIVED"] * 2 + ["BROKEN"] * 2, shown
    assert "0 places in double.py have the text" in shown
    assert (tmp_path / "double.py").read_text() == TREE["double.py"]


def test_a_test_that_fails_anyway_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutate(tmp_path, CAUGHT.replace("test_it", "test_that_is_not_there")) == 1
    assert "without any bug" in capsys.readouterr().out
