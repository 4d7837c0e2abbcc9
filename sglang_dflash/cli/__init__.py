"""The `sglang-dflash` command: one module per verb."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from sglang_dflash.cli.command import Command, Failed
from sglang_dflash.facts.errors import ConfigError

# Setting that an error names -> the flag for it.
OWN_FLAGS = {
    "block_size": "--block-size",
    "window": "--window",
    "sinks": "--sinks",
    "draft_kv_tokens": "--draft-kv-tokens",
    "worker": "--speculative-dflash-worker",
}

_CLI = "sglang_dflash.cli."
COMMANDS = {
    "env": Command(
        "versions, devices, plugins and seams, and which worker serves: for a bug report",
        _CLI + "env",
    ),
    "demo-models": Command(
        "print the directories of an embedded pair: the target's, then the draft's",
        _CLI + "demo_models",
    ),
    "inspect": Command(
        "whether a pair can be served and what it costs, before any weight is loaded",
        _CLI + "inspect",
    ),
    "doctor": Command("what is wrong with a running server, and what to do", _CLI + "doctor"),
    "generate": Command(
        "continue one prompt over Transformers, without a server", _CLI + "generate"
    ),
    "bench": Command(
        "compare ways of decoding: throughput, latency, acceptance, and that outputs are the same",
        _CLI + "bench",
    ),
}


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import sglang_dflash

        print(f"sglang-dflash {sglang_dflash.__version__}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Returns 1, with the reason on stderr, if it cannot be done."""
    argv = sys.argv[1:] if argv is None else argv
    # Flags after -- are the servers' and are not parsed here.
    ours, theirs = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :])
        if "--" in argv and argv[0] == "bench"
        else (argv, [])
    )
    if not argv:
        _parser(asked=None).print_help()
        return 0
    args = _parser(asked=ours[0] if ours else None).parse_args(
        ours, argparse.Namespace(server_flags=theirs, asked=shlex.join(["sglang-dflash", *argv]))
    )
    try:
        COMMANDS[args.command].run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # `head`, say, has read enough. Python would print an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ConfigError, Failed) as error:
        text = error.in_words(OWN_FLAGS) if isinstance(error, ConfigError) else error
        print(f"sglang-dflash: {text}", file=sys.stderr)
        return 1
    return 0


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the one that is asked for."""
    parser = argparse.ArgumentParser(
        prog="sglang-dflash", description="DFlash speculative decoding for SGLang"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        of_command = parsers.add_parser(name, help=command.help)
        if name == asked:
            command.arguments(of_command)
    return parser
