"""Runs an experiment, which is one module of this folder:

    python -m experiments EXPERIMENT [--out FILE] [options]

Such a module has `Options`, a dataclass whose fields carry their help (`setting`); `run(options)`,
which returns the result as one dict, or yields the result so far, which --out then has at any time;
`table(result)`, the lines to read; and, if a result may not hold, `failure(result)`, which tells
why it does not, or None. The last line of the output is the result as one JSON object; progress
goes to stderr.

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
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.progress import progress_bar
from sglang_dflash.drafting.machine import hardware
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
    """`Options` of an experiment without any."""


@contextmanager
def all_at_once(arms: Mapping[str, ServerConfig]) -> Iterator[dict[str, Server]]:
    """All arms' servers side by side. Raises Failed."""
    servers = {name: Server(config, timeout_s=START_TIMEOUT_S) for name, config in arms.items()}
    with together(servers.values()):
        yield servers


def one_after_another(
    arms: Mapping[str, ServerConfig], work: Callable[[Server], T]
) -> dict[str, T]:
    """`work(server)` on each arm's server, one server at a time. Raises Failed."""
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
    """`work(name, round)` for all names in every round; every other round in reverse order."""
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
    """`take_turns` with passes, after a round to warm up. Raises RuntimeError if the answers of a
    round are not the same for all names."""
    take_turns(names, 1, work, f"{label}warm-up, ")
    turns = take_turns(names, rounds, work, label)
    for first, *others in zip(*turns.values(), strict=True):
        if any(other.ids != first.ids for other in others):
            raise RuntimeError("the servers' outputs differ: no figure without exactness")
    return turns


def experiments() -> dict[str, str]:
    """All experiments: name -> the first line of the docstring. Imports none of them."""
    found = {}
    for path in sorted(HOME.glob("*.py")):
        source = path.read_text()
        if "\ndef run(options: Options) " in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one experiment's options."""
    module = importlib.import_module(f"experiments.{name}")
    found = argparse.ArgumentParser(
        prog=f"python -m experiments {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(found, module.Options, spelled(module.Options.__dataclass_fields__))
    found.add_argument("--out", type=Path, metavar="FILE", help="also write the result to it")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if the result does not hold."""
    known = experiments()
    command = argparse.ArgumentParser(
        prog="python -m experiments",
        epilog="\n".join(f"{name:17}  {line}" for name, line in known.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "experiment", choices=known, metavar="EXPERIMENT", help="EXPERIMENT --help: its options"
    )
    # What follows the name belongs to the experiment.
    name = command.parse_args(argv[:1]).experiment
    module, own = importlib.import_module(f"experiments.{name}"), parser(name)
    args = own.parse_args(argv[1:])
    options = module.Options(**given(args, module.Options))
    try:
        # Servers end with the experiment.
        with sigterm_as_exit():
            found = module.run(options)
            for so_far in [found] if isinstance(found, dict) else found:
                result = {"command": repeated(name, options), "hardware": hardware(), **so_far}
                if args.out is not None:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
    except ConfigError as error:
        print(f"{name}: {error.named(flag_names(own))}", file=sys.stderr)
        return 1
    print(*module.table(result), sep="\n")
    failure = module.failure(result) if hasattr(module, "failure") else None
    if failure is not None:
        print(f"{name}: {failure}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 0 if failure is None else 1


def repeated(name: str, options: Any) -> str:
    """The command line that repeats a run, with every option that is not empty."""
    words = ["python", "-m", "experiments", name]
    for field, flag in spelled(options.__dataclass_fields__).items():
        value = getattr(options, field)
        if value is True:
            words.append(flag)
        elif value is not False and value != "":
            words += [flag, str(value)]
    return shlex.join(words)
