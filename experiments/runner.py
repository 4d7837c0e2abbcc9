"""Runs an experiment, which is one module of this folder:

    python -m experiments EXPERIMENT [--out FILE] [options]

Such a module has `Options`, a dataclass whose fields carry their help (`setting`); `run(options)`,
which returns the result as one dict, or yields results so far, each of which is written to --out;
`table(result)`, which returns lines to read; and, if a result may miss a goal, `failure(result)`,
which returns the reason, or None. The last line of the output is the result as one JSON object;
progress goes to stderr.

Loads without torch, SGLang and `requests`: some experiments run on machines that lack them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sglang_dflash.common.command_line import add_flags, flag_names, given, spelled
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.common.files import check_writable
from sglang_dflash.common.machine import hardware, reach_this_machine
from sglang_dflash.common.progress import progress_bar
from sglang_dflash.tools.bench.server import Server, ServerConfig, sigterm_as_exit, together

if TYPE_CHECKING:
    from sglang_dflash.tools.bench.load import BenchPass

HOME = Path(__file__).parent
# A server that starts slowly must not end a run of an hour.
START_TIMEOUT_S = 1800

T = TypeVar("T")
P = TypeVar("P", bound="BenchPass")


@dataclass(frozen=True)
class NoOptions:
    """`Options` of an experiment that has none."""


@contextmanager
def all_at_once(arms: Mapping[str, ServerConfig]) -> Iterator[dict[str, Server]]:
    """Run the servers of all arms at once. Raises Failed."""
    servers = {name: Server(config, timeout_s=START_TIMEOUT_S) for name, config in arms.items()}
    with together(servers.values()):
        yield servers


def one_after_another(
    arms: Mapping[str, ServerConfig], work: Callable[[Server], T]
) -> dict[str, T]:
    """Call `work(server)` for each arm's server, one server at a time. Raises Failed."""
    results = {}
    with progress_bar(len(arms)) as bar:
        for name, config in arms.items():
            bar.set_description(name)
            with Server(config, timeout_s=START_TIMEOUT_S) as server:
                results[name] = work(server)
            bar.update()
    return results


def take_turns(
    names: Iterable[str], rounds: int, work: Callable[[str, int], T], label: str = ""
) -> dict[str, list[T]]:
    """Call `work(name, round)` for all names in every round, in reverse order every other round."""
    order = list(names)
    results: dict[str, list[T]] = {name: [] for name in order}
    with progress_bar(rounds * len(order)) as bar:
        for i in range(rounds):
            for name in reversed(order) if i % 2 else order:
                bar.set_description(f"{label}round {i + 1} of {rounds}: {name}")
                results[name].append(work(name, i))
                bar.update()
    return results


def exact_turns(
    names: Iterable[str], rounds: int, work: Callable[[str, int], P], label: str = ""
) -> dict[str, list[P]]:
    """Measure passes by `take_turns`, after a round to warm up. Raises RuntimeError if the answers
    of a round are not equal for all names."""
    take_turns(names, 1, work, f"{label}warm-up, ")
    turns = take_turns(names, rounds, work, label)
    for reference, *compared in zip(*turns.values(), strict=True):
        if any(bench_pass.ids != reference.ids for bench_pass in compared):
            raise RuntimeError("the servers' outputs differ: no figure without exactness")
    return turns


def experiments() -> dict[str, str]:
    """Return the first line of the docstring of each experiment, by name, without importing it."""
    first_lines = {}
    for path in sorted(HOME.glob("*.py")):
        source = path.read_text()
        if "\ndef run(options: Options) " in source:
            first_lines[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return first_lines


def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one experiment's options."""
    module = importlib.import_module(f"experiments.{name}")
    options_parser = argparse.ArgumentParser(
        prog=f"python -m experiments {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(options_parser, module.Options, spelled(module.Options.__dataclass_fields__))
    options_parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the result to it"
    )
    return options_parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status, 1 if the experiment has a `failure`."""
    first_lines = experiments()
    command = argparse.ArgumentParser(
        prog="python -m experiments",
        epilog="\n".join(f"{name:17}  {line}" for name, line in first_lines.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "experiment",
        choices=first_lines,
        metavar="EXPERIMENT",
        help="EXPERIMENT --help: its options",
    )
    # Arguments after the name belong to the experiment.
    name = command.parse_args(argv[:1]).experiment
    module, options_parser = importlib.import_module(f"experiments.{name}"), parser(name)
    args = options_parser.parse_args(argv[1:])
    options = module.Options(**given(args, module.Options))
    reach_this_machine()
    try:
        if args.out is not None:
            check_writable("out", args.out)
        # On SIGTERM, servers end with the experiment.
        with sigterm_as_exit():
            results = module.run(options)
            for so_far in [results] if isinstance(results, dict) else results:
                result = {"command": command_of(name, options), "hardware": hardware(), **so_far}
                if args.out is not None:
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
    except ConfigError as error:
        print(f"{name}: {error.named(flag_names(options_parser, argv))}", file=sys.stderr)
        return 1
    except Failed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(*module.table(result), sep="\n")
    failure = module.failure(result) if hasattr(module, "failure") else None
    if failure is not None:
        print(f"{name}: {failure}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 0 if failure is None else 1


def command_of(name: str, options: Any) -> str:
    """The command line that repeats a run, with every option that is not empty."""
    words = ["python", "-m", "experiments", name]
    for field, flag in spelled(options.__dataclass_fields__).items():
        value = getattr(options, field)
        # A flag of several values is repeated.
        for each in value if isinstance(value, tuple) else (value,):
            if each is True:
                words.append(flag)
            elif each is not False and each != "":
                words += [flag, str(each)]
    return shlex.join(words)
