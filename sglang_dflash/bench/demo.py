"""The demo: plain decoding and DFLASH side by side, on the same prompts, from two servers here.

    python -m sglang_dflash.bench.demo [--model code] [--check] [--out FILE]

On a terminal both first stream some answers at once. Then all are measured: greedy, float32, one
request at a time, in turns; the server that waits sleeps. With --check it
ends after the comparison and its last line is one JSON object; without, it keeps serving DFLASH
until Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from sglang_dflash.bench.load import chunks
from sglang_dflash.bench.server import Server, demo_config, sigterm_as_exit, together
from sglang_dflash.bench.settings import BenchSettings
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.drafting.machine import hardware
from sglang_dflash.facts.command_line import add_flags
from sglang_dflash.facts.embedded import demo_pair

SAMPLING = {"temperature": 0, "max_new_tokens": 128, "ignore_eos": True}


class Timed(NamedTuple):
    """An answer's token ids, its verify steps (0 in plain decoding), and the seconds that it
    took."""

    ids: list[int]
    steps: int
    seconds: float


def show(urls: Mapping[str, str], prompts: Sequence[str]) -> None:
    """Stream both servers' answers at once, side by side. To look at: they share the machine, so
    nothing is measured.

    Args:
        urls: of the servers, by name.
    """
    answers = dict.fromkeys(urls, "")

    def stream(name: str, prompt: str) -> None:
        body = {"text": prompt, "sampling_params": SAMPLING, "stream": True}
        for chunk in chunks(f"{urls[name]}/generate", body):
            answers[name] = chunk["text"]

    def panels() -> Columns:
        texts = ((name, Text(answer[-700:])) for name, answer in answers.items())
        return Columns([Panel(text, title=name, width=68, height=18) for name, text in texts])

    with Live(get_renderable=panels, refresh_per_second=8), ThreadPoolExecutor() as pool:
        for prompt in prompts:
            list(pool.map(stream, urls, [prompt] * len(urls)))


def ask(server: Server, prompt: str) -> Timed:
    began = time.perf_counter()
    answer = server.generate(prompt, **SAMPLING)
    seconds = time.perf_counter() - began
    return Timed(answer["output_ids"], answer["meta_info"].get("spec_verify_ct") or 0, seconds)


def compare(plain: Server, dflash: Server, prompts: list[str]) -> dict[str, Any]:
    """Run all prompts on both servers, in turns, and summarize."""
    servers, answers = (plain, dflash), dict[Server, list[Timed]]()
    for server in servers:
        server.generate(prompts[0], temperature=0, max_new_tokens=32)
        answers[server] = []
    for i, prompt in enumerate(prompts):
        for server in servers[:: -1 if i % 2 else 1]:
            answers[server].append(ask(server, prompt))
        rates = " -> ".join(f"{tokens_per_second(of):.1f}" for of in answers.values())
        print(f"prompt {i + 1}/{len(prompts)}: {rates} tok/s", flush=True)
    return outcome(*answers.values())


def tokens_per_second(answers: list[Timed]) -> float:
    return sum(len(one.ids) for one in answers) / sum(one.seconds for one in answers)


def outcome(plain: list[Timed], dflash: list[Timed]) -> dict[str, Any]:
    """What the answers of two servers to the same prompts come to."""
    ratios = sorted(a.seconds / b.seconds for a, b in zip(plain, dflash, strict=True))
    ar_tok_s, dflash_tok_s = tokens_per_second(plain), tokens_per_second(dflash)
    counts = sum((of_answer(one.steps, len(one.ids)) for one in dflash), VerifySteps())
    length = counts.acceptance_length
    # A prefill gives the first token; in plain decoding every forward gives one.
    ar_step = round(1000 / ar_tok_s, 2)
    forwards = counts.steps + len(dflash)
    dflash_step = round(1000 * sum(one.seconds for one in dflash) / forwards, 2)
    return {
        "identical": [one.ids for one in plain] == [one.ids for one in dflash],
        "acceptance_length": None if length is None else round(length, 3),
        "ar_tok_s": round(ar_tok_s, 2),
        "dflash_tok_s": round(dflash_tok_s, 2),
        "speedup": round(dflash_tok_s / ar_tok_s, 3),
        "speedup_by_prompt": {
            "median": round(statistics.median(ratios), 3),
            "min": round(ratios[0], 3),
            "max": round(ratios[-1], 3),
        },
        "ar_step_ms": ar_step,
        "dflash_step_ms": dflash_step,
        "step_ratio": round(dflash_step / ar_step, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser, BenchSettings, {"pair": "--model"}, {"pair": "code"})
    parser.set_defaults(pair="code")
    parser.add_argument(
        "--check", action="store_true", help="end after the comparison; the last line is JSON"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="with --check: also write the result, with the machine",
    )
    args = parser.parse_args()
    with sigterm_as_exit(), suppress(KeyboardInterrupt):
        run(args)


def run(args: argparse.Namespace) -> None:
    """The whole demo; it exits if it only checks."""
    pair = demo_pair(args.pair)
    on_gpu = torch.cuda.is_available()
    plain, dflash = (
        Server(demo_config(pair, dflash=dflash, accelerator=on_gpu)) for dflash in (False, True)
    )
    print("starting two SGLang servers, one plain and one with DFLASH (about a minute)", flush=True)
    with ExitStack() as servers:
        servers.enter_context(together((plain, dflash)))
        if sys.stdout.isatty():
            show({"plain decoding": plain.url, "DFLASH": dflash.url}, pair.prompts[:3])
        found = compare(plain, dflash, pair.prompts[:12])
        result = {"text": pair.text, **found}
        plain.stop()
        print(summary(result, "GPU" if on_gpu else "CPU"))
        if args.check:
            if args.out is not None:
                # How a checkout repeats it.
                choice = "" if args.pair == "code" else f" --model {args.pair}"
                command = f"bash launch/demo.sh{choice} --check"
                card = {"command": command, "hardware": hardware(), **result}
                args.out.write_text(json.dumps(card, indent=1) + "\n")
            print(json.dumps(result), flush=True)
            # A GPU verifies a block with other kernels than it decodes a token with.
            sys.exit(0 if result["identical"] or on_gpu else 1)
        print(
            f"DFLASH serves at {dflash.url} "
            "(OpenAI API under /v1, facts under /server_info). Ctrl-C ends it.",
            flush=True,
        )
        dflash.process.wait()


def summary(result: dict[str, Any], device: str) -> str:
    rows = (
        ("", "plain decoding", "DFLASH"),
        ("output tokens/s", result["ar_tok_s"], f"{result['dflash_tok_s']} ({result['speedup']}x)"),
        ("tokens per verify step", 1, result["acceptance_length"]),
        ("ms per target forward", result["ar_step_ms"], result["dflash_step_ms"]),
        ("same output", "", "yes, to the token" if result["identical"] else "NO"),
    )
    title = f"greedy, float32, concurrency 1, this machine's {device}; {result['text']}"
    return "\n".join([title, *(f"{a:24}{b!s:16}{c}" for a, b, c in rows)])


if __name__ == "__main__":
    main()
