"""The table in tests/README.md: promises of README and docs, with the place of their proof.

    python -m tests.promises [--check]

Promises and proofs are written by hand. A promise is quoted: its words stand on the page that is
named before it. A proof is a test, or a file of tests. The program writes the last column, from the
bugs in tests/reliability/mutations.toml and the proofs in the tables of patches. The exit status
is 1 if words are not on their page or a proof does not exist, and with `--check`, which writes
nothing, if the page would change.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from launch.mutate import LIST, read_list
from sglang_dflash.plugins.platform_cpu import patches as platform_cpu
from sglang_dflash.plugins.repairs import patches as repairs
from sglang_dflash.serving import patches as serving
from tests import ROOT

PAGE = ROOT / "tests/README.md"
PATCHES = (
    *serving.PATCHES, *serving.WORKER_PATCHES, *serving.BUILTIN_PATCHES, *serving.REPLAY_PATCHES,
    *repairs.PATCHES, *platform_cpu.PATCHES,
)  # fmt: skip


class Row(NamedTuple):
    """A row of the table, and the page that its promise is quoted from."""

    page: str
    promise: str
    proofs: tuple[str, ...]


def rows(text: str) -> Iterator[tuple[str, Row | None]]:
    """Every line, with its row; None for a line that is none."""
    for line in text.splitlines():
        if not line.startswith("| ") or line.startswith("| page "):
            yield line, None
            continue
        page, promise, proofs, _ = line.removeprefix("| ").removesuffix("|").split(" | ")
        yield line, Row(page, promise, tuple(proofs.split(", ")))


def causes() -> dict[str, list[str]]:
    """Bugs by name, and functions without their patch, for each test that they make fail."""
    found: dict[str, list[str]] = defaultdict(list)
    for bug in read_list(ROOT / LIST):
        for test in bug.tests:
            found[test.partition("[")[0]].append(f"`{bug.name}`")
    for patch in PATCHES:
        found[patch.proof].append(f"no patch of `{patch.attribute}`")
    return found


def page() -> str:
    """The page as it should be."""
    found, lines = causes(), []
    for line, row in rows(PAGE.read_text()):
        if row is None:
            lines.append(line)
            continue
        caught = [cause for proof in row.proofs for cause in found[f"tests/{proof}"]]
        cells = (row.page, row.promise, ", ".join(row.proofs), ", ".join(dict.fromkeys(caught)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mistakes() -> Iterator[str]:
    """Promises that their page does not make, and proofs that are not there."""
    for _, row in rows(PAGE.read_text()):
        if row is None:
            continue
        if row.promise not in " ".join((ROOT / row.page).read_text().split()):
            yield f"{row.page} does not say: {row.promise}"
        for proof in row.proofs:
            file, _, test = proof.partition("::")
            path = ROOT / "tests" / file
            if not path.is_file() or (test and f"def {test}(" not in path.read_text()):
                yield f"no such test: {proof}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.promises")
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    wrong, text = list(mistakes()), page()
    is_current = text == PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(text)
        is_current = True
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return int(bool(wrong) or not is_current)


if __name__ == "__main__":
    sys.exit(main())
