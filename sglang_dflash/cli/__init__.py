"""The `sglang-dflash` command: one module per verb."""

from __future__ import annotations

import argparse
import shlex
import sys

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.cli import bench, demo_models, generate, inspect
from sglang_dflash.cli.command import Command, Failed

# Errors of `Options` name the server's flags; these commands have shorter ones.
OWN_FLAGS = {
    "--speculative-num-draft-tokens": "--block-size",
    "--speculative-draft-window-size": "--window",
    "--speculative-draft-sink-size": "--sinks",
    "--speculative-dflash-draft-kv-tokens": "--draft-kv-tokens",
}

COMMANDS = {
    "demo-models": Command(
        "print the directories of an embedded pair: the target's, then the draft's",
        demo_models.arguments,
        demo_models.run,
    ),
    "inspect": Command(
        "whether a pair can be served and what it costs, from the configs",
        inspect.arguments,
        inspect.run,
    ),
    "generate": Command(
        "continue one prompt over Transformers, without a server", generate.arguments, generate.run
    ),
    "bench": Command(
        "compare ways of decoding: throughput, latency, acceptance, and that outputs are the same",
        bench.arguments,
        bench.run,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Returns 1, with the reason on stderr, if it cannot be done."""
    parser = argparse.ArgumentParser(
        prog="sglang-dflash", description="DFlash speculative decoding for SGLang"
    )
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.arguments(parsers.add_parser(name, help=command.help))
    argv = sys.argv[1:] if argv is None else argv
    # Flags after -- are the servers' and are not parsed here.
    ours, theirs = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :])
        if "--" in argv and argv[0] == "bench"
        else (argv, [])
    )
    args = parser.parse_args(
        ours, argparse.Namespace(server_flags=theirs, asked=shlex.join(["sglang-dflash", *argv]))
    )
    try:
        COMMANDS[args.command].run(args)
    except (ConfigError, Failed) as error:
        print(f"sglang-dflash: {_with_own_flags(error)}", file=sys.stderr)
        return 1
    return 0


def _with_own_flags(error: Exception) -> str:
    message = str(error)
    for theirs, ours in OWN_FLAGS.items() if isinstance(error, ConfigError) else ():
        message = message.replace(theirs, ours)
    return message
