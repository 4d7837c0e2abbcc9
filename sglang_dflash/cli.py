"""The `sglang-dflash` command."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.bench import settings as bench
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.core.options import Options
from sglang_dflash.hf.arguments import DTYPES, GenerateArgs
from sglang_dflash.inspect_pair.memory import DTYPE_BYTES, Serving
from sglang_dflash.inspect_pair.report import as_table, inspect

# Errors of `Options` name the server's flags; these commands have shorter ones.
OWN_FLAGS = {
    "--speculative-num-draft-tokens": "--block-size",
    "--speculative-draft-window-size": "--window",
    "--speculative-draft-sink-size": "--sinks",
    "--speculative-dflash-draft-kv-tokens": "--draft-kv-tokens",
}


class Failed(Exception):
    """A valid request that could not be carried out. The message gives the reason."""


class Command(NamedTuple):
    """A sub-command: its help line, what declares its arguments and what runs it.

    `run` prints its result, or raises ConfigError or Failed.
    """

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _demo_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", help="dense or hybrid")


def _demo_models(args: argparse.Namespace) -> None:
    pair = demo_pair(args.kind)
    print(pair.target.resolve())
    print(pair.draft.resolve())


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    default, dtypes = Serving(), list(DTYPE_BYTES)
    add = parser.add_argument
    add("target", help="a folder with config.json, or a hub name")
    add("draft", help="a folder with config.json, or a hub name")
    add("--window", type=int, help="committed tokens that the draft attends to (default: all)")
    add(
        "--sinks",
        type=int,
        default=Options.sinks,
        help="first tokens of a request that stay visible beside the window",
    )
    add("--block-size", type=int, help="tokens verified per step (default: the draft's)")
    add(
        "--max-running-requests",
        type=int,
        default=default.max_running_requests,
        help="default: %(default)s",
    )
    add("--draft-kv-tokens", type=int, help="entries of the draft KV cache under a window")
    add(
        "--memory-gib",
        type=float,
        default=default.memory_gib,
        help="device memory, GiB (default: %(default)s)",
    )
    add(
        "--mem-fraction",
        type=float,
        default=default.mem_fraction,
        help="fraction of it for weights and KV (default: %(default)s)",
    )
    add(
        "--kv-memory-gib",
        type=float,
        help="memory for both KV pools, GiB (default: computed from the weights)",
    )
    add("--kv-dtype", choices=dtypes, help="target KV (default: bfloat16)")
    add("--draft-kv-dtype", choices=dtypes, help="draft KV (default: the target's)")
    add("--offline", action="store_true", help="do not ask the hub")
    add("--json", action="store_true", help="print one JSON object")


def _inspect(args: argparse.Namespace) -> None:
    options = Options(
        block_size=args.block_size,
        window=args.window,
        sinks=args.sinks,
        draft_kv_tokens=args.draft_kv_tokens,
    )
    serving = Serving(
        max_running_requests=args.max_running_requests,
        memory_gib=args.memory_gib,
        mem_fraction=args.mem_fraction,
        kv_memory_gib=args.kv_memory_gib,
        kv_dtype=args.kv_dtype,
        draft_kv_dtype=args.draft_kv_dtype,
    )
    target, draft = (
        look_up(kind, getattr(args, kind), offline=args.offline) for kind in ("target", "draft")
    )
    report = inspect(target, draft, options, serving).report()
    print(json.dumps(report) if args.json else as_table(report))


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    default = GenerateArgs
    parser.add_argument(
        "--target", help="a folder or a hub name (default: the embedded dense pair's)"
    )
    parser.add_argument(
        "--draft", help="a folder or a hub name (default: the embedded dense pair's)"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="the text to continue")
    what.add_argument("--prompt-file", help="a file that holds it; - for standard input")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message: apply the chat template",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=default.max_new_tokens, help="default: %(default)s"
    )
    parser.add_argument(
        "--temperature", type=float, default=default.temperature, help="0 is greedy (default)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=default.top_p,
        help="keep the likeliest tokens of this mass (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=default.top_k,
        help="keep this many of the likeliest tokens; 0 keeps all (default)",
    )
    parser.add_argument("--seed", type=int, help="of the sampling (default: a new one)")
    parser.add_argument(
        "--block-size", type=int, help="tokens verified per step (default: the draft's)"
    )
    parser.add_argument(
        "--window", type=int, help="committed tokens that the draft attends to (default: all)"
    )
    parser.add_argument(
        "--dtype", help=f"{', '.join(DTYPES)} (default: float32 on a CPU, bfloat16 elsewhere)"
    )
    parser.add_argument("--device", help="as torch names it (default: the first GPU, or cpu)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )


def _generate(args: argparse.Namespace) -> None:
    if (args.target is None) != (args.draft is None):
        raise ConfigError(
            "--target and --draft: one without the other; give both, or neither for the embedded "
            "dense pair"
        )
    if args.target is None:
        pair = demo_pair("dense")
        args.target, args.draft = str(pair.target), str(pair.draft)
    request = GenerateArgs(
        target=args.target,
        draft=args.draft,
        prompt=_text(args),
        chat=args.chat,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        options=Options(block_size=args.block_size, window=args.window),
        dtype=args.dtype,
        device=args.device,
    )
    from sglang_dflash.hf.generate import main as generate

    generate(request, as_json=args.json)


def _text(args: argparse.Namespace) -> str:
    if args.prompt_file is None:
        return args.prompt
    try:
        return (
            sys.stdin.read()
            if args.prompt_file == "-"
            else Path(args.prompt_file).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompt-file: {args.prompt_file!r} cannot be read ({error})"
        ) from error


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-dflash bench [options] [-- FLAGS of every server that is started]"
    _bench_inputs(parser)
    _bench_load(parser)


def _bench_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    repeatable: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    add(
        "--arm",
        **repeatable,
        help=f"{', '.join(bench.KINDS)}; repeat for more (default: ar and dflash); "
        "ratios are to the first",
    )
    add(
        "--base-url",
        action="append",
        metavar="NAME=URL",
        help="a running server, SGLang or of the OpenAI API (vLLM), as an arm; repeat for more",
    )
    add("--model", help="an embedded pair: dense (default) or hybrid")
    add("--target", help="a folder or a hub name; with --base-url, whose tokenizer the servers use")
    add("--draft", help="a folder or a hub name")
    add(
        "--dataset",
        **repeatable,
        help="demo, stdlib (built in; the default), gsm8k, math500, humaneval, mbpp, mt-bench, "
        "alpaca; repeat for more",
    )
    add(
        "--dataset-file",
        metavar="JSONL",
        help='lines {"prompt": TEXT}, or {"turns": [TEXT, ...]} for the chat template',
    )
    add(
        "--cache-dir",
        help="folder of fetched data sets (default: sglang-dflash/datasets in the user's cache)",
    )


def _bench_load(parser: argparse.ArgumentParser) -> None:
    cpu, large = bench.ON_CPU, bench.ON_ACCELERATOR
    add = parser.add_argument
    add(
        "--concurrency",
        help=f"requests at a time (default: {large.concurrency}; {cpu.concurrency} on a CPU)",
    )
    add(
        "--block-size",
        type=int,
        action="append",
        metavar="B",
        help="tokens verified per step (default: the draft's); repeat for an arm per size",
    )
    add(
        "--num-prompts",
        type=int,
        help=f"of each data set (default: {large.num_prompts}; {cpu.num_prompts} on a CPU)",
    )
    add(
        "--max-new-tokens",
        type=int,
        help=f"per answer (default: {large.max_new_tokens}; {cpu.max_new_tokens} on a CPU)",
    )
    add(
        "--rounds",
        type=int,
        help=f"passes per arm and concurrency (default: {large.rounds}; {cpu.rounds} on a CPU)",
    )
    add(
        "--thinking",
        choices=["on", "off"],
        help="pass this to the chat template (default: the template decides)",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate past the end token (default: for plain texts, not for chats)",
    )
    add(
        "--simulated-acceptance",
        type=float,
        metavar="L",
        help="for timing: every verify step commits L tokens, right or wrong; outputs mean nothing "
        "and are not compared, and of --target and --draft only configs and tokenizer are read",
    )
    add(
        "--dtype",
        choices=bench.DTYPES,
        help="what the servers compute in; only in float32 must all outputs be equal",
    )
    add(
        "--in-turn",
        action=argparse.BooleanOptionalAction,
        help="one server after another (default: for given models on an accelerator)",
    )
    add(
        "--out",
        default=bench.OUT,
        metavar="DIR",
        help="gets results.json, table.md and throughput.png (default: %(default)s)",
    )


def _bench(args: argparse.Namespace) -> None:
    settings = bench.Settings.of({**vars(args), "command": args.asked})
    from sglang_dflash.bench import compare
    from sglang_dflash.bench.gate import OutputsDiffer
    from sglang_dflash.bench.load import RequestFailed
    from sglang_dflash.bench.server import ServerFailed

    try:
        compare.main(settings)
    except (OutputsDiffer, RequestFailed, ServerFailed) as error:
        raise Failed(str(error)) from error


COMMANDS = {
    "demo-models": Command(
        "print the directories of an embedded pair: the target's, then the draft's",
        _demo_models_arguments,
        _demo_models,
    ),
    "inspect": Command(
        "whether a pair can be served and what it costs, from the configs",
        _inspect_arguments,
        _inspect,
    ),
    "generate": Command(
        "continue one prompt over Transformers, without a server", _generate_arguments, _generate
    ),
    "bench": Command(
        "compare ways of decoding: throughput, latency, acceptance, and that outputs are the same",
        _bench_arguments,
        _bench,
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


if __name__ == "__main__":
    sys.exit(main())
