"""Put bugs back, one at a time, and see the tests go red.

    python tools/mutate.py

reads tests/reliability/mutations.toml. Each bug is a text that is replaced in one file of a
temporary copy of the tree; the tests that it names must fail then, and pass without it. Prints a
line per bug. The exit status is 1 if one survives, if its text is not found exactly once, or if a
test fails without it.

Python, torch and SGLang are loaded once, and each bug gets a process that is forked from there.
With SGLang comes what it loads of its platforms, ours included: a bug in such a file is refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = Path("tests/reliability/mutations.toml")
OURS = ("sglang_dflash", "dflash_kernels")
# Loaded before the first fork.
PRELOADED = (
    "pytest",
    "hypothesis",
    "scipy.stats",
    "torch",
    "torch._subclasses.fake_tensor",
    "transformers",
    "sglang.srt.managers.scheduler",
)
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"


@dataclass(frozen=True)
class Mutation:
    """A bug: `old`, which `file` holds exactly once, becomes `new`.

    Attributes:
        chosen: "blind" if whoever chose it had not read the tests, else "known".
        tests: pytest node ids of functions, all of which must fail.
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


@dataclass(frozen=True)
class Verdict:
    """What became of a bug, and why if it was not killed."""

    outcome: str
    seconds: float
    why: str = ""


class Results:
    """A pytest plugin: the outcome of every test by node id. True if it passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed


def loaded_files(packages: Sequence[str]) -> list[Path]:
    """The files of the modules that this process has of some packages."""
    files = {
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages
    }
    return sorted(Path(file).resolve() for file in files if file)


def load_once(copy: Path, modules: Sequence[str]) -> None:
    """Import what all processes share, with the copy in place of the tree."""
    os.chdir(copy)
    paths = [str(copy), str(copy / "kernels")]
    # Not all below the tree: .venv with the libraries is there, too.
    theirs = {ROOT, ROOT / "kernels", ROOT / "tools"}
    sys.path[:] = [*paths, *(path for path in sys.path if Path(path).resolve() not in theirs)]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), TMPDIR=str(copy.parent))
    # Options for other tests, of a tree that may not be this one.
    os.environ.pop("PYTEST_ADDOPTS", None)
    # Compiled files are told apart by whole seconds.
    sys.dont_write_bytecode = True
    # As tests/conftest.py does: Triton reads it when a kernel of its own library is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in modules:
        importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]


def copy_tree(root: Path, to: Path) -> None:
    """Copy the files that git tracks or would track."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def run_tests(copy: Path, tests: Sequence[str], results: Path, timeout: int) -> None:
    """In a forked process: run the tests of the copy, and write their outcomes."""
    log = os.open(copy.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    import pytest

    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", f"--timeout={timeout}"]
    if "hypothesis" in sys.modules:
        options.append("--hypothesis-seed=0")
    plugin = Results()
    status = int(pytest.main([*options, *tests], plugins=[plugin]))
    outside = [file for file in loaded_files(OURS) if not file.is_relative_to(copy)]
    found = {"status": status, "passed": plugin.passed, "outside": [str(f) for f in outside]}
    results.write_text(json.dumps(found))


def outcomes(copy: Path, tests: Sequence[str], timeout: int) -> dict[str, Any]:
    """Run tests in a process of their own. An empty dict if it did not end in time, or crashed."""
    results = copy.parent / "results.json"
    results.unlink(missing_ok=True)
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=run_tests, args=(copy, tests, results, timeout))
    process.start()
    process.join(timeout + 60)
    if process.is_alive():
        process.kill()
        process.join()
    return json.loads(results.read_text()) if results.exists() else {}


def functions_of(passed: dict[str, bool]) -> dict[str, bool]:
    """Of each test function, whether it passed with all of its parameters."""
    found: dict[str, bool] = {}
    for node, ok in passed.items():
        function = node.partition("[")[0]
        found[function] = found.get(function, True) and ok
    return found


def try_out(copy: Path, mutation: Mutation, timeout: int) -> Verdict:
    """Apply a bug to the copy, run its tests, and put the file back."""
    began, path = time.monotonic(), copy / mutation.file
    if path in loaded_files(OURS):
        return Verdict(BROKEN, 0.0, "the file is loaded before the fork")
    original = path.read_text()
    try:
        path.write_text(mutation.applied(original))
        found = outcomes(copy, mutation.tests, timeout)
    except (ValueError, OSError) as error:
        return Verdict(BROKEN, time.monotonic() - began, str(error))
    finally:
        path.write_text(original)
    seconds = time.monotonic() - began
    if not found:
        # A test that hangs or a process that dies is red in pytest, too.
        return Verdict(KILLED, seconds, "the process did not end, or died")
    if found["outside"]:
        return Verdict(BROKEN, seconds, f"imported from elsewhere: {found['outside'][0]}")
    functions = functions_of(found["passed"])
    unknown = [test for test in mutation.tests if test not in functions]
    if unknown:
        return Verdict(BROKEN, seconds, f"not run: {unknown[0]}")
    green = [test for test in mutation.tests if functions[test]]
    if green:
        return Verdict(SURVIVED, seconds, f"passed: {', '.join(green)}")
    return Verdict(KILLED, seconds)


def red_without(copy: Path, mutations: Sequence[Mutation], timeout: int) -> list[str]:
    """Tests that do not pass without any bug."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    functions = functions_of(outcomes(copy, tests, timeout).get("passed", {}))
    return [test for test in tests if not functions.get(test, False)]


def run(root: Path, mutations: Sequence[Mutation], timeout: int, preload: Sequence[str]) -> int:
    """Try all bugs and print the table. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="sglang-dflash-mutate-") as folder:
        copy = Path(folder).resolve() / "tree"
        copy_tree(root, copy)
        load_once(copy, preload)
        red = red_without(copy, mutations, timeout)
        if red:
            print("these tests fail, or are not found, without any bug:", *red, sep="\n    ")
            print((Path(folder) / "log").read_text()[-4000:])
            return 1
        width = max(len(mutation.name) for mutation in mutations)
        counts = {KILLED: 0, SURVIVED: 0, BROKEN: 0}
        for mutation in mutations:
            verdict = try_out(copy, mutation, timeout)
            counts[verdict.outcome] += 1
            print(
                f"{verdict.outcome:8}  {mutation.name:{width}}  {mutation.chosen:5}  "
                f"{verdict.seconds:5.1f} s  {mutation.file}  {verdict.why}".rstrip(),
                flush=True,
            )
    print(f"{counts[KILLED]} of {len(mutations)} killed")
    return int(counts[KILLED] < len(mutations))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="bugs to try; all by default")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--list", type=Path, help=f"by default {LIST} of the tree")
    parser.add_argument("--timeout", type=int, default=300, help="seconds per test")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="modules to load once")
    args = parser.parse_args()
    mutations = read_list(args.list or args.root / LIST)
    unknown = set(args.names) - {mutation.name for mutation in mutations}
    if unknown:
        parser.error(f"no mutation is named {sorted(unknown)[0]!r}")
    chosen = [m for m in mutations if not args.names or m.name in args.names]
    return run(args.root.resolve(), chosen, args.timeout, args.preload)


if __name__ == "__main__":
    sys.exit(main())
