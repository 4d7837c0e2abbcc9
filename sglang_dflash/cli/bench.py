"""`sglang-dflash bench`."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_dflash.bench import settings as bench
from sglang_dflash.cli.command import Failed


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-dflash bench [options] [-- FLAGS of every server that is started]"
    _add_inputs(parser)
    _add_load(parser)
    _add_behavior(parser)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
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
    add("--model", help="an embedded pair: dense (default), hybrid or code")
    add("--target", help="a folder or a hub name; with --base-url, whose tokenizer the servers use")
    add("--draft", help="a folder or a hub name")
    add(
        "--dataset",
        "--dataset-name",
        **repeatable,
        help="demo, stdlib, unseen, unseen-long, agents, alternating, random (built in), gsm8k, "
        "math500, humaneval, mbpp, mt-bench, alpaca; repeat for more (default: demo and stdlib; "
        "unseen for --model code)",
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


def _add_load(parser: argparse.ArgumentParser) -> None:
    cpu, large = bench.ON_CPU, bench.ON_ACCELERATOR
    add = parser.add_argument
    add(
        "--concurrency",
        "--max-concurrency",
        metavar="N[,N...]",
        help=f"requests at a time (default: {large.concurrency}; {cpu.concurrency} on a CPU; "
        "as many as prompts with --request-rate)",
    )
    add(
        "--request-rate",
        type=float,
        metavar="R",
        help="send R requests per second, at random times (default: as soon as a client is free)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the choice of prompts and of the times to send (default: %(default)s)",
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


def _add_behavior(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
        "--port",
        type=int,
        help="of the first server that is started here, the next ones for the others (default: "
        "free ones)",
    )
    add(
        "--out",
        default=bench.OUT,
        metavar="DIR",
        help="gets results.json and table.md (default: %(default)s)",
    )
    add(
        "--output-file",
        metavar="JSONL",
        help="also append the report to this file, as one line of JSON",
    )
    add(
        "--picture",
        action="store_true",
        help="also draw throughput.png in the folder of --out (needs matplotlib: "
        "sglang-dflash[bench])",
    )
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")


def run(args: argparse.Namespace) -> None:
    settings = bench.Settings.of({**vars(args), "command": args.asked})
    from sglang_dflash.bench import compare
    from sglang_dflash.bench.gate import OutputsDiffer
    from sglang_dflash.bench.load import RequestFailed
    from sglang_dflash.bench.server import ServerFailed
    from sglang_dflash.bench.sigterm import sigterm_as_exit

    try:
        with sigterm_as_exit():
            compare.main(settings)
    except (OutputsDiffer, RequestFailed, ServerFailed) as error:
        raise Failed(str(error)) from error
