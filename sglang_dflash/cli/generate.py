"""`sglang-dflash generate`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_dflash.drafting.options import Options
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.transformers_loop.arguments import DTYPES, GenerateArgs


def arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> None:
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
    _let_waiting_threads_sleep()
    from sglang_dflash.transformers_loop.generate import main as generate

    generate(request, as_json=args.json)


def _let_waiting_threads_sleep() -> None:
    """By default OpenMP's threads spin while they wait for one another, and hold the core that the
    last of them needs. The OpenMP library reads the variable when torch loads it."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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
