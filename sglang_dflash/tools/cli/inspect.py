"""`sglang-dflash inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from os.path import exists
from pathlib import Path

from sglang_dflash.checkpoint.fields import READ_BY_SGLANG
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.common.command_line import add_flags, given
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.drafting.options import Options
from sglang_dflash.serving.metrics.server_info import OURS
from sglang_dflash.tools.inspect import launch_command
from sglang_dflash.tools.inspect.launch_command import OPTION_FLAGS, SERVING_FLAGS, spellings
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from sglang_dflash.tools.inspect.suggest import Pair, suggest
from sglang_dflash.tools.inspect.table import as_table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-dflash inspect TARGET [DRAFT] [options], or inspect -- LAUNCH COMMAND"
    add = parser.add_argument
    add("target", help="a folder with config.json, or a hub name")
    add(
        "draft",
        nargs="?",
        help="a folder with config.json, or a hub name (default: the one published for the target)",
    )
    add_flags(parser, Options, spellings(OPTION_FLAGS))
    add_flags(parser, Serving, spellings(SERVING_FLAGS))
    add(
        "--sessions",
        type=positive,
        metavar="N",
        help="requests of --context tokens that are to run at a time (default: as many as fit)",
    )
    add("--offline", action="store_true", help="do not ask the hub")
    add("--sources", action="store_true", help="also print where the facts were read")
    add("--json", action="store_true", help="print one JSON object")


def positive(text: str) -> int:
    """Parse a positive number. Raises ValueError, which argparse reports."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def split(argv: list[str], own_flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Translate a launch command in the arguments into flags of `inspect`.

    Returns:
        The arguments of `inspect`, and the launch command; an empty list if there is none.

    Args:
        own_flags: flags of `inspect`, which may be mixed with a server's if there is no `--`.

    Raises:
        ConfigError: see `launch_command.read`.
    """
    if "--" in argv:
        own_words, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    elif launch_command.is_launch(argv):
        own_options, command = launch_command.without_own(argv[1:], own_flags)
        own_words = [*argv[:1], *own_options]
    else:
        return argv, []
    return [*own_words, *launch_command.read(command).words], command


def run(args: argparse.Namespace) -> None:
    """Print the report.

    Raises:
        ConfigError: a server would refuse the pair or its flags.
        Failed: the requests of `--sessions` do not fit.
    """
    command = launch_command.read(args.server_flags) if args.server_flags else None
    options = Options(**given(args, Options))
    target = look_up("target", args.target, offline=args.offline)
    serving = Serving(**given(args, Serving)).for_target(target.config)
    named = args.draft or published_draft(args.target)
    draft = look_up("draft", named, offline=args.offline)
    builtin = command and command.builtin
    report = inspect(target, draft, options, serving, builtin)
    if command is not None and command.not_reckoned:
        left_out = ", ".join(command.not_reckoned)
        report["warnings"].insert(0, f"not part of the arithmetic: {left_out}")
    if command is not None and not {"mem_fraction", "kv_memory_gib"} & given(args, Serving).keys():
        report["warnings"].append(
            "the command has no --mem-fraction-static: SGLang chooses a fraction by the GPU and "
            f"the model, often a smaller one than the {serving.mem_fraction:g} of these figures"
        )
    if args.sessions is not None and serving.context is None:
        raise ConfigError("sessions", args.sessions, "needs {context}, the tokens of a request")
    report["suggestions"] = None
    if serving.context is not None:
        others = tuple(command.others) if command else ()
        pair = Pair(target, draft, options, serving, builtin, others)
        report["suggestions"] = suggest(pair, args.sessions)
        running = given(args, Serving).get("max_running_requests", 0)
        if args.sessions is None and report["requests_at_context"] < running:
            report["at_context"] += f"; --sessions {running} tells what runs {running}"
    if exists(named) and exists(args.target):
        _check_as_sglang_reads_it(Path(args.target), Path(named), report["worker"])
    print(json.dumps(report) if args.json else as_table(report, sources=args.sources))
    if args.sessions is not None and not report["suggestions"]["command"]:
        requests = f"{args.sessions:,} requests of {serving.context:,} tokens"
        raise Failed(f"inspect: {requests} do not fit at a time")


def _check_as_sglang_reads_it(target: Path, draft: Path, worker: str) -> None:
    """Raise ConfigError if SGLang would refuse files that we do not read: a draft that its own
    worker serves, or files that only SGLang reads. Takes seconds, mostly for imports."""
    if worker == OURS and not any((draft / name).exists() for name in READ_BY_SGLANG):
        return
    print("loading SGLang, which reads these files, too ...", file=sys.stderr)
    from sglang_dflash.serving.start.draft_files import check_of_a_server

    check_of_a_server(str(draft), str(target))
