"""The demo: plain decoding and DFLASH side by side, on the same prompts, from two servers here.

    python -m launch.demo.main [--model smollm2] [--check] [--out FILE] [--picture SVG]

On a terminal, both servers first answer some prompts at once. Then all prompts are measured:
greedy, in float32 (on a GPU bfloat16), one request at a time, in turns; the waiting server sleeps.
With --check, the demo ends after the comparison, and its last line is one JSON object. Otherwise it
keeps serving DFLASH until Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from launch.demo.answer_picture import picture
from launch.demo.race import LiveAnswer, race
from sglang_dflash.common.command_line import add_flags, flag_names
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.common.files import check_writable
from sglang_dflash.common.machine import hardware, reach_this_machine
from sglang_dflash.common.progress import progress_bar, waiting
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.tools.bench import datasets
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.bench.server import (
    Server,
    ServerConfig,
    default_dtype,
    demo_config,
    sigterm_as_exit,
    together,
)
from sglang_dflash.tools.bench.settings import BenchSettings
from sglang_dflash.tools.demo_pairs import fetch as public_target
from sglang_dflash.tools.demo_pairs.pairs import DemoPair, demo_pair, kinds
from sglang_dflash.tools.demo_pairs.public_target import KIND

# Prompts that are measured, and the number of them that are shown first.
MEASURED, SHOWN = 12, 3
# Tokens in a row that an answer which loops repeats.
LOOP = 12
# Built-in data sets of the chat model's prompts.
TASKS = ("chat", "code", "edits")


class MeasuredAnswer(NamedTuple):
    """An answer's token ids, its verify steps (0 in plain decoding), and its seconds."""

    ids: list[int]
    steps: int
    seconds: float


def prompts_of(pair: DemoPair) -> list[tuple[str, Prompt]]:
    """Return prompts with their tasks: first turns of the data sets `TASKS` in turn, or the texts
    of a pair without a chat template."""
    if pair.kind != KIND:
        return [("text", Prompt((text,), chat=False)) for text in pair.prompts[:MEASURED]]
    count = MEASURED // len(TASKS)
    by_task = [[(task, prompt) for prompt in datasets.load(task, count)] for task in TASKS]
    in_turns = list(chain.from_iterable(zip(*by_task, strict=True)))
    return [(task, Prompt(prompt.turns[:1], chat=True)) for task, prompt in in_turns]


def config_of(pair: DemoPair, *, dflash: bool, on_gpu: bool) -> ServerConfig:
    """Configure a server. The chat pair gets a server's defaults, memorized pairs whole blocks."""
    config = demo_config(pair, dflash=dflash, accelerator=on_gpu)
    return config.without_flags("--speculative-dflash-width") if pair.kind == KIND else config


def ask(server: Server, prompt: list[int], sampling: dict[str, Any]) -> MeasuredAnswer:
    began = time.perf_counter()
    answer = server.generate(prompt, **sampling)
    seconds = time.perf_counter() - began
    return MeasuredAnswer(
        answer["output_ids"], answer["meta_info"].get("spec_verify_ct") or 0, seconds
    )


def answers_of(
    plain: Server, dflash: Server, prompts: Sequence[list[int]], sampling: dict[str, Any]
) -> tuple[list[MeasuredAnswer], list[MeasuredAnswer]]:
    """Let both servers answer all prompts (token ids), in turns. Returns their answers."""
    servers, answers = (plain, dflash), dict[Server, list[MeasuredAnswer]]()
    for server in servers:
        server.generate(prompts[0], temperature=0, max_new_tokens=32)
        answers[server] = []
    for i, prompt in enumerate(prompts):
        for server in servers[:: -1 if i % 2 else 1]:
            answers[server].append(ask(server, prompt, sampling))
        rates = " -> ".join(f"{tokens_per_second(timed):.1f}" for timed in answers.values())
        print(f"prompt {i + 1}/{len(prompts)}: {rates} tok/s", flush=True)
    return answers[plain], answers[dflash]


def speedups(
    tasks: Sequence[str], plain: list[MeasuredAnswer], dflash: list[MeasuredAnswer]
) -> dict[str, float]:
    """Return DFLASH's tokens/s over plain decoding's, by task."""
    ratios = {}
    for task in dict.fromkeys(tasks):
        rows = [i for i, task_of_row in enumerate(tasks) if task_of_row == task]
        rates = [tokens_per_second([answers[i] for i in rows]) for answers in (dflash, plain)]
        ratios[task] = round(rates[0] / rates[1], 2)
    return ratios


def median_prompt(plain: list[MeasuredAnswer], dflash: list[MeasuredAnswer]) -> int:
    """Return the index of the prompt with the median speedup (the lower one of two) among those
    whose answers do not loop, or among all: a loop is easy to draft, and dull to read."""
    ratios = [a.seconds / b.seconds for a, b in zip(plain, dflash, strict=True)]
    readable = [ratio for a, ratio in zip(plain, ratios, strict=True) if not loops(a.ids)]
    return ratios.index(statistics.median_low(readable or ratios))


def loops(ids: Sequence[int]) -> bool:
    """Return whether any `LOOP` tokens in a row occur twice."""
    runs = [tuple(ids[i : i + LOOP]) for i in range(len(ids) - LOOP + 1)]
    return len(set(runs)) < len(runs)


def draw(
    pair: DemoPair,
    plain: Server,
    dflash: Server,
    prompt: tuple[str, Any],
    sampling: dict[str, Any],
) -> str:
    """Draw both answers to a prompt at the moment at which the faster one ends. The servers answer
    one after another, each with the whole machine."""
    text, ids = prompt
    lanes = [LiveAnswer("plain decoding"), LiveAnswer("DFLASH")]
    for lane, server in zip(lanes, (plain, dflash), strict=True):
        lane.read(server.url, {"input_ids": ids, "sampling_params": sampling})
    moment = min(lane.seconds for lane in lanes)
    device = "one GPU" if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    model = "SmolLM2-135M-Instruct" if pair.kind == KIND else f"the demo pair {pair.kind}"
    caption = (
        f"{model}, {device}, median of {MEASURED} prompts, loops left out: bash launch/demo.sh"
    )
    return picture(text, [lane.until(moment) for lane in lanes], caption)


def tokens_per_second(answers: list[MeasuredAnswer]) -> float:
    return sum(len(answer.ids) for answer in answers) / sum(answer.seconds for answer in answers)


def outcome(plain: list[MeasuredAnswer], dflash: list[MeasuredAnswer]) -> dict[str, Any]:
    """Compare the answers of two servers to the same prompts."""
    ratios = sorted(a.seconds / b.seconds for a, b in zip(plain, dflash, strict=True))
    ar_tok_s, dflash_tok_s = tokens_per_second(plain), tokens_per_second(dflash)
    counts = sum((of_answer(answer.steps, len(answer.ids)) for answer in dflash), VerifySteps())
    length = counts.acceptance_length
    # A prefill gives the first token. In plain decoding every forward gives one token.
    ar_step = round(1000 / ar_tok_s, 2)
    forwards = counts.steps + len(dflash)
    dflash_step = round(1000 * sum(answer.seconds for answer in dflash) / forwards, 2)
    return {
        "identical": [answer.ids for answer in plain] == [answer.ids for answer in dflash],
        "acceptance_length": None if length is None else round(length, 2),
        "ar_tok_s": round(ar_tok_s, 2),
        "dflash_tok_s": round(dflash_tok_s, 2),
        "speedup": round(dflash_tok_s / ar_tok_s, 2),
        "speedup_by_prompt": {
            "median": round(statistics.median(ratios), 2),
            "min": round(ratios[0], 2),
            "max": round(ratios[-1], 2),
        },
        "ar_step_ms": ar_step,
        "dflash_step_ms": dflash_step,
        "step_ratio": round(dflash_step / ar_step, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser, BenchSettings, {"pair": "--model"}, {"pair": KIND})
    parser.set_defaults(pair=KIND)
    parser.add_argument(
        "--check", action="store_true", help="end after the comparison; the last line is JSON"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="with --check: also write the result, with the machine",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="SVG",
        help="also draw both answers to the prompt with the median speedup",
    )
    args = parser.parse_args()
    reach_this_machine()
    try:
        with sigterm_as_exit(), suppress(KeyboardInterrupt):
            for name in ("out", "picture"):
                if getattr(args, name) is not None:
                    check_writable(name, getattr(args, name))
            run(args)
    except ConfigError as error:
        sys.exit(f"demo: {error.named(flag_names(parser) | {'demo pair': '--model'})}")
    except Failed as error:
        sys.exit(f"demo: {error}")


def run(args: argparse.Namespace) -> None:
    """Run the demo. Exits after the comparison with --check."""
    if args.pair == KIND:
        public_target.fetch()
    pair, on_gpu = demo_pair(args.pair), torch.cuda.is_available()
    prompts = prompts_of(pair)
    encode = datasets.token_encoder(str(pair.target))
    ids = [encode(prompt, []) for _, prompt in prompts]
    sampling = {"temperature": 0, "max_new_tokens": 128, "ignore_eos": pair.kind != KIND}
    plain, dflash = (
        Server(config_of(pair, dflash=dflash, on_gpu=on_gpu)) for dflash in (False, True)
    )
    with ExitStack() as servers:
        activity = "starting two SGLang servers, plain decoding and DFLASH"
        with progress_bar(1, steady=False) as bar, waiting(bar, activity, None):
            servers.enter_context(together((plain, dflash)))
        texts = [prompt.turns[0] for _, prompt in prompts]
        texts_and_ids = list(zip(texts, ids, strict=True))
        if sys.stdout.isatty():
            race({"plain": plain.url, "DFLASH": dflash.url}, texts_and_ids[:SHOWN], sampling)
        answers = answers_of(plain, dflash, ids, sampling)
        by_task = speedups([task for task, _ in prompts], *answers)
        result = {"text": kinds()[pair.kind], **outcome(*answers), "speedup_by_task": by_task}
        if args.picture:
            drawn = draw(pair, plain, dflash, texts_and_ids[median_prompt(*answers)], sampling)
            args.picture.write_text(drawn)
        plain.stop()
        print(summary(result, "GPU" if on_gpu else "CPU", default_dtype(on_gpu)))
        if args.check:
            _end(result, args, on_gpu)
        print(
            f"DFLASH serves at {dflash.url} "
            "(OpenAI API under /v1, facts under /server_info). Ctrl-C ends it.",
            flush=True,
        )
        dflash.process.wait()


def _end(result: dict[str, Any], args: argparse.Namespace, on_gpu: bool) -> NoReturn:
    if args.out is not None:
        # The command that repeats the run in a checkout.
        choice = "" if args.pair == KIND else f" --model {args.pair}"
        command = f"bash launch/demo.sh{choice} --check"
        card = {"command": command, "hardware": hardware(), **result}
        args.out.write_text(json.dumps(card, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    # bfloat16 flips near-ties.
    sys.exit(0 if result["identical"] or on_gpu else 1)


def summary(result: dict[str, Any], device: str, dtype: str) -> str:
    rows = (
        ("", "plain decoding", "DFLASH"),
        ("output tokens/s", result["ar_tok_s"], f"{result['dflash_tok_s']} ({result['speedup']}x)"),
        *(
            (task, "", f"{ratio}x")
            for task, ratio in result["speedup_by_task"].items()
            if len(result["speedup_by_task"]) > 1
        ),
        ("by prompt", "", "{median}x ({min}x to {max}x)".format(**result["speedup_by_prompt"])),
        ("tokens per step", 1, result["acceptance_length"]),
        ("ms per target forward", result["ar_step_ms"], result["dflash_step_ms"]),
        ("same output", "", "yes, to the token" if result["identical"] else "NO"),
    )
    title = f"greedy, {dtype}, concurrency 1, this machine's {device}; {result['text']}"
    return "\n".join([title, *(f"{a:24}{b!s:16}{c}" for a, b, c in rows)])


if __name__ == "__main__":
    main()
