"""The `sglang-dflash` command: one module per verb, with the functions `arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import sys
from typing import Any

from sglang_dflash.common.command_line import Parser, flag_names
from sglang_dflash.common.errors import ConfigError, Failed

VERBS = {
    "env": "which worker serves, and why; versions and machine, for a bug report; with --changes "
    "what is changed in SGLang",
    "demo-models": "print the directories of an embedded pair: the target's, then the draft's",
    "inspect": "whether a pair can be served and what it costs, before any weight is loaded",
    "doctor": "acceptance length of a running server, what is wrong with it, and what to do",
    "check-gpu": "whether our kernels compute what torch does on this GPU, and how fast; without "
    "SGLang and weights",
    "generate": "continue one prompt over Transformers, without a server",
    "bench": "compare ways of decoding: throughput, latency, acceptance, and that outputs are the "
    "same",
}


class _Version(argparse.Action):
    """The action of --version: look up the version, print it and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import sglang_dflash

        print(f"sglang-dflash {sglang_dflash.__version__}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns the exit status: 1 if it fails, with the reason on stderr; 130 after
    Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    parser, parsers = _make_parsers()
    if not argv:
        parser.print_help()
        return 0
    own_argv, server_argv = argv, list[str]()
    args = argparse.Namespace(verb=argv[0])
    try:
        if argv[0] in parsers:
            # Import only the verb's own module.
            verb, of_verb = module(argv[0]), parsers[argv[0]]
            verb.arguments(of_verb)
            if hasattr(verb, "split"):
                own_argv, server_argv = verb.split(argv, of_verb._option_string_actions)
        command = shlex.join(["sglang-dflash", *argv])
        namespace = argparse.Namespace(server_flags=server_argv, command=command)
        args, unknown = parser.parse_known_args(own_argv, namespace)
        if unknown:
            parsers[args.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
        module(args.verb).run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Without this, Python would print an error
        # when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("sglang-dflash: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ConfigError as error:
        names = flag_names(parsers[args.verb], argv) | {"server_flags": "flags after --"}
        print(f"sglang-dflash: {error.named(names)}", file=sys.stderr)
        return 1
    except Failed as error:
        print(f"sglang-dflash: {error}", file=sys.stderr)
        return 1
    return 0


def module(verb: str) -> Any:
    """A verb's module."""
    return importlib.import_module(f"sglang_dflash.tools.cli.{verb.replace('-', '_')}")


def _make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the command's parser, and the parsers of the verbs, still without arguments."""
    parser = Parser(prog="sglang-dflash", description="DFlash speculative decoding for SGLang")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parsers = parser.add_subparsers(dest="verb", required=True)
    return parser, {
        verb: parsers.add_parser(verb, help=text, description=text) for verb, text in VERBS.items()
    }
