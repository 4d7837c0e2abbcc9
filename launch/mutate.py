"""Put bugs back, one at a time, and check that tests fail.

    python launch/mutate.py [NAME ...]

reads tests/reliability/mutations.toml. Each bug replaces a text in one file of a temporary copy of
the tree. The tests that it names must fail with the bug, and pass without it. Prints a line per
bug. The exit status is 1 if a bug survives, if its text does not occur exactly once, or if a test
fails without any bug.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = "tests/reliability/mutations.toml"
TIMEOUT_S = 300
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"


@dataclass(frozen=True)
class Mutation:
    """A bug: `old`, which occurs exactly once in `file`, is replaced by `new`.

    Attributes:
        chosen: "blind" if the bug was chosen without knowledge of the tests, else "known".
        tests: pytest node ids, all of which must fail: functions, or single sets of parameters.
    """

    name: str
    chosen: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Return a text with the bug. Raises ValueError unless `old` occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {count} places in {self.file} have the text, not 1")
        return text.replace(self.old, self.new)


def read_list(path: Path) -> list[Mutation]:
    """Read a list of bugs. Raises ValueError if two have the same name, or one names no test."""
    mutations = []
    for row in tomllib.loads(path.read_text())["mutation"]:
        mutations.append(Mutation(**{**row, "tests": tuple(row["tests"])}))
        if not mutations[-1].tests:
            raise ValueError(f"{mutations[-1].name}: names no test")
    names = [mutation.name for mutation in mutations]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two mutations have the name {twice.pop()!r}")
    return mutations


def copy_tree(root: Path, to: Path) -> None:
    """Copy the files that git tracks or would track."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def run_tests(copy: Path, tests: Sequence[str]) -> dict[str, bool]:
    """Run tests of the copy. Returns whether each function passed with all of its parameters, and
    whether it passed with each set of parameters. All have failed if the process died."""
    paths = f"{copy}:{copy / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    # Without bytecode files, whose time stamps have whole seconds, and without inherited options.
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-rA", "--tb=no", *tests]
    command += ["-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", "--hypothesis-seed=0"]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if done.returncode < 0:
        return dict.fromkeys(tests, False)
    passed: dict[str, bool] = {}
    # An error in a fixture or an import is no result of a test.
    for outcome, test, parameters in re.findall(
        r"^(PASSED|FAILED) (\S+?::\w+)(\[.*?\])?", done.stdout, re.M
    ):
        for name in {test, test + parameters}:
            passed[name] = passed.get(name, True) and outcome == "PASSED"
    return passed


def try_mutation(copy: Path, mutation: Mutation) -> tuple[str, str]:
    """Apply a bug to the copy, run its tests, and restore the file. Returns the outcome, and the
    reason if the bug was not killed."""
    path = copy / mutation.file
    try:
        original = path.read_text()
        path.write_text(mutation.apply(original))
    except (ValueError, OSError) as error:
        return BROKEN, str(error)
    passed = run_tests(copy, mutation.tests)
    path.write_text(original)
    unknown = [test for test in mutation.tests if test not in passed]
    if unknown:
        return BROKEN, f"not run: {unknown[0]}"
    green = [test for test in mutation.tests if passed[test]]
    return (SURVIVED, f"passed: {', '.join(green)}") if green else (KILLED, "")


def run(root: Path, mutations: Sequence[Mutation]) -> int:
    """Try all bugs and print the table. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="sglang-dflash-mutate-") as folder:
        copy = Path(folder)
        copy_tree(root, copy)
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        passed = run_tests(copy, tests)
        red = [test for test in tests if not passed.get(test, False)]
        if red:
            print("these tests fail, or are not found, without any bug:", *red, sep="\n    ")
            return 1
        killed, width = 0, max(len(mutation.name) for mutation in mutations)
        for mutation in mutations:
            began = time.monotonic()
            outcome, why = try_mutation(copy, mutation)
            killed += outcome == KILLED
            print(
                f"{outcome:8}  {mutation.name:{width}}  {mutation.chosen:5}  "
                f"{time.monotonic() - began:5.1f} s  {mutation.file}  {why}".rstrip(),
                flush=True,
            )
    print(f"{killed} of {len(mutations)} killed")
    return int(killed < len(mutations))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="bugs to try; all by default")
    names = parser.parse_args().names
    mutations = read_list(ROOT / LIST)
    unknown = set(names) - {mutation.name for mutation in mutations}
    if unknown:
        parser.error(f"no mutation is named {sorted(unknown)[0]!r}")
    return run(ROOT, [m for m in mutations if not names or m.name in names])


if __name__ == "__main__":
    sys.exit(main())
