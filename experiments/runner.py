"""Runs an experiment: reads its options, runs its workload, writes its result.

    python -m experiments --list
    python -m experiments EXPERIMENT [--out FILE] [--rounds N ...]

The last line of the output is the result as one JSON object; progress goes to stderr, as a bar on a
terminal and as lines elsewhere. Loads without torch, SGLang and
`requests`: some experiments run on machines that lack them.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang_dflash.bench.machine import hardware, progress_bar
from sglang_dflash.bench.server import ServerConfig, sigterm_as_exit
from sglang_dflash.facts.errors import ConfigError

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

HOME = Path(__file__).parent
# A server that starts slowly must not end a run of an hour.
START_TIMEOUT_S = 1800

OptionsT = TypeVar("OptionsT")
Case = TypeVar("Case")
T = TypeVar("T")

Arms = Mapping[str, ServerConfig]
# Takes what begins now, how many steps of this stage are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class NoOptions:
    """For experiments without options."""


@dataclass(frozen=True)
class Experiment(Generic[OptionsT, T]):
    """What is compared, on what, and what is reported.

    Attributes:
        name: its module in this folder.
        description: the module's docstring.
        workload: runs it on the arms, in one of the ways below, and returns what it measured.
        report: the result's own keys, from what was measured.
        options: a frozen dataclass whose fields all have defaults (see `option`).
        arms: the servers by name; none by default.
        table: the result for reading, line by line.
        picture: writes a picture of the result as a PNG beside `--out`.
        failure: why a result does not hold, or None; the exit status is 1 if it does not.
    """

    name: str
    description: str
    workload: Callable[[Arms, OptionsT, Progress], T]
    report: Callable[[T, OptionsT], dict[str, Any]]
    options: type[OptionsT] = NoOptions  # type: ignore[assignment]
    arms: Callable[[OptionsT], Arms] = lambda _: {}
    table: Callable[[dict[str, Any]], Iterable[str]] = lambda _: ()
    picture: Callable[[dict[str, Any], Path], None] | None = None
    failure: Callable[[dict[str, Any]], str | None] = lambda _: None


def option(default: Any, help: str, choices: Iterable[str] | None = None) -> Any:
    """A field of an experiment's options; its type is the default's. False: a flag without a
    value."""
    return field(default=default, metadata={"help": help, "choices": choices})


# ---- ways of running


@contextmanager
def all_at_once(arms: Arms) -> Iterator[dict[str, Server]]:
    """All arms' servers side by side. Raises ServerFailed."""
    from sglang_dflash.bench.server import Server, together

    servers = {name: Server(config, timeout_s=START_TIMEOUT_S) for name, config in arms.items()}
    with together(servers.values()):
        yield servers


def one_after_another(
    arms: Arms, work: Callable[[str, Server], T], progress: Progress
) -> dict[str, T]:
    """`work(name, server)` on each arm's server, one server at a time. Raises ServerFailed."""
    from sglang_dflash.bench.server import Server

    def on_server(name: str, config: ServerConfig) -> T:
        with Server(config, timeout_s=START_TIMEOUT_S) as server:
            return work(name, server)

    return case_by_case(arms, on_server, progress)


def case_by_case(
    cases: Mapping[str, Case], work: Callable[[str, Case], T], progress: Progress
) -> dict[str, T]:
    """`work(name, case)` for each case in order; without a server unless `work` asks one."""
    results = {}
    for done, (name, case) in enumerate(cases.items()):
        progress(name, done, len(cases))
        results[name] = work(name, case)
    return results


def take_turns(
    names: Iterable[str], rounds: int, work: Callable[[str, int], T], progress: Progress
) -> dict[str, list[T]]:
    """`work(name, round)` for all names in every round; every other round in reverse order."""
    order = list(names)
    results: dict[str, list[T]] = {name: [] for name in order}
    for i in range(rounds):
        for at, name in enumerate(reversed(order) if i % 2 else order):
            line = f"round {i + 1} of {rounds}: {name}"
            progress(line, i * len(order) + at, rounds * len(order))
            results[name].append(work(name, i))
    return results


# ---- the command


def experiments() -> dict[str, str]:
    """All experiments: name -> the first line of the description. Imports none of them."""
    found = {}
    for path in sorted(HOME.glob("*.py")):
        source = path.read_text()
        if "\nEXPERIMENT = " in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status."""
    known = experiments()
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        usage="%(prog)s EXPERIMENT [options], or %(prog)s --list",
        description="Run one experiment; EXPERIMENT --help shows its options.",
    )
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT")
    parser.add_argument("--list", action="store_true", help="list the experiments")
    # What follows the name belongs to the experiment.
    args = parser.parse_args(argv[:1])
    if args.list:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {line}" for name, line in known.items()))
        return 0
    if args.experiment is None:
        parser.error("an experiment is required; see --list")
    if args.experiment not in known:
        near = difflib.get_close_matches(args.experiment, known)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        parser.error(f"no experiment {args.experiment!r}; {meant}--list shows all")
    module = importlib.import_module(f"experiments.{args.experiment}")
    try:
        with sigterm_as_exit():
            return run(module.EXPERIMENT, argv[1:])
    except ConfigError as error:
        print(f"{args.experiment}: {error}", file=sys.stderr)
        return 1


def run(experiment: Experiment[Any, Any], argv: Sequence[str]) -> int:
    """Run one experiment with its arguments; the exit status."""
    args = _parser(experiment).parse_args(argv)
    options = experiment.options(**{f.name: getattr(args, f.name) for f in _fields(experiment)})
    with _Stages() as progress:
        measured = experiment.workload(experiment.arms(options), options, progress)
    result = {
        "command": command(experiment, options),
        "hardware": hardware(),
        **experiment.report(measured, options),
    }
    if not args.json:
        for line in experiment.table(result):
            print(line)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        if experiment.picture is not None:
            experiment.picture(result, args.out.with_suffix(".png"))
    failure = experiment.failure(result)
    if failure is not None:
        print(f"{experiment.name}: {failure}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 0 if failure is None else 1


def command(experiment: Experiment[Any, Any], options: Any) -> str:
    """The command line that repeats a run, with every option that is not empty."""
    words = ["python", "-m", "experiments", experiment.name]
    for one in _fields(experiment):
        value = getattr(options, one.name)
        if value is True:
            words.append(_flag(one))
        elif value is not False and value != "":
            words += [_flag(one), str(value)]
    return shlex.join(words)


class _Stages:
    """Shows a run's progress, stage by stage: a stage ends where another number of steps, or one
    that has been done, begins."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, line: str, done: int, of: int) -> None:
        if self._bar is None or of != self._bar.total or done <= self._bar.n:
            self.__exit__()
            self._bar = progress_bar(of)
        self._bar.update(done - self._bar.n)
        self._bar.set_description(line)


def _fields(experiment: Experiment[Any, Any]) -> tuple[Field[Any], ...]:
    return fields(experiment.options)


def _flag(one: Field[Any]) -> str:
    return f"--{one.name.replace('_', '-')}"


def _parser(experiment: Experiment[Any, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {experiment.name}",
        description=experiment.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for one in _fields(experiment):
        if one.default is False:
            parser.add_argument(_flag(one), action="store_true", help=one.metadata.get("help"))
            continue
        parser.add_argument(
            _flag(one),
            type=type(one.default),
            default=one.default,
            choices=one.metadata.get("choices"),
            help=f"{one.metadata.get('help', '')} (default: %(default)s)",
        )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the result to this file"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else"
    )
    return parser
