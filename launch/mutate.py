"""Put bugs back, one at a time, and see the tests go red.

    python launch/mutate.py [NAME ...]

reads tests/reliability/mutations.toml. Each bug is a text that is replaced in one file of a
temporary copy of the tree; the tests that it names must fail then, and pass without it. Prints a
line per bug. The exit status is 1 if one survives, if its text is not found exactly once, or if a
test fails without it.
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
    """A bug: `old`, which `file` holds exactly once, becomes `new`.

    Attributes:
        chosen: "blind" if whoever chose it had not read the tests, else "known".
        tests: pytest node ids, all of which must fail: of functions, or of one set of parameters.
    """

    name: str
    chosen: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the bug. Raises ValueError unless `old` is in it exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {count} places in {self.file} have the text, not 1")
        return text.replace(self.old, self.new)


def read_list(path: Path) -> list[Mutation]:
    """The bugs of a list. Raises ValueError if two have one name, or one names no test."""
    found = []
    for row in tomllib.loads(path.read_text())["mutation"]:
        found.append(Mutation(**{**row, "tests": tuple(row["tests"])}))
        if not found[-1].tests:
            raise ValueError(f"{found[-1].name}: names no test")
    names = [mutation.name for mutation in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two mutations have the name {twice.pop()!r}")
    return found


def copy_tree(root: Path, to: Path) -> None:
    """Copy the files that git tracks or would track."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def outcomes(copy: Path, tests: Sequence[str]) -> dict[str, bool]:
    """Run tests of the copy: of each function, whether it passed with all of its parameters, and of
    each set of parameters. All failed if the process died."""
    paths = f"{copy}:{copy / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    # Compiled files are told apart by whole seconds. Options for other tests are not for these.
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-rA", "--tb=no", *tests]
    command += ["-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", "--hypothesis-seed=0"]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if done.returncode < 0:
        return dict.fromkeys(tests, False)
    found: dict[str, bool] = {}
    # An error of a fixture or of an import is no outcome of a function.
    for outcome, test, given in re.findall(
        r"^(PASSED|FAILED) (\S+?::\w+)(\[.*?\])?", done.stdout, re.M
    ):
        for name in {test, test + given}:
            found[name] = found.get(name, True) and outcome == "PASSED"
    return found


def try_out(copy: Path, mutation: Mutation) -> tuple[str, str]:
    """Apply a bug to the copy, run its tests, and put the file back: the outcome, and why if the
    bug was not killed."""
    path = copy / mutation.file
    try:
        original = path.read_text()
        path.write_text(mutation.applied(original))
    except (ValueError, OSError) as error:
        return BROKEN, str(error)
    found = outcomes(copy, mutation.tests)
    path.write_text(original)
    unknown = [test for test in mutation.tests if test not in found]
    if unknown:
        return BROKEN, f"not run: {unknown[0]}"
    green = [test for test in mutation.tests if found[test]]
    return (SURVIVED, f"passed: {', '.join(green)}") if green else (KILLED, "")


def run(root: Path, mutations: Sequence[Mutation]) -> int:
    """Try all bugs and print the table. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="sglang-dflash-mutate-") as folder:
        copy = Path(folder)
        copy_tree(root, copy)
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        passed = outcomes(copy, tests)
        red = [test for test in tests if not passed.get(test, False)]
        if red:
            print("these tests fail, or are not found, without any bug:", *red, sep="\n    ")
            return 1
        killed, width = 0, max(len(mutation.name) for mutation in mutations)
        for mutation in mutations:
            began = time.monotonic()
            outcome, why = try_out(copy, mutation)
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
