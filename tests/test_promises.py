"""tests/README.md is what its program writes, and leaves out no bug and no patch."""

from __future__ import annotations

from launch.mutate import LIST, ROOT, read_list
from tests.promises import PAGE, PATCHES, page


def test_the_index_is_current() -> None:
    """Run `python -m tests.promises` if it is not."""
    assert page() == PAGE.read_text()


def test_every_bug_and_every_patch_has_a_row() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| ")]
    for bug in read_list(ROOT / LIST):
        for test in bug.tests:
            file = test.partition("::")[0].removeprefix("tests/")
            assert any(f"| {file} |" in row and f"`{bug.name}`" in row for row in rows), bug.name
    for patch in PATCHES:
        file = patch.proof.partition("::")[0].removeprefix("tests/")
        cause = f".{patch.attribute}`"
        assert any(f"| {file} |" in row and cause in row for row in rows), patch.target
