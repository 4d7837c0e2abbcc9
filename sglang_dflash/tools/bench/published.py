"""The published benchmark command: one running server, or a pair over Transformers.

Its flags, names of figures and summary are those of the model cards.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflash.common.command_line import add_flags, flag_names, given, spelled
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.common.files import check_writable
from sglang_dflash.common.machine import reach_this_machine
from sglang_dflash.common.progress import progress_bar
from sglang_dflash.tools.bench import datasets, load, report
from sglang_dflash.tools.bench.compare import Ask, load_prompts
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.bench.load import BenchPass, Endpoint
from sglang_dflash.tools.bench.published_settings import PublishedSettings

FOR_ALL = spelled(
    (
        "backend", "dataset_file", "num_prompts", "max_new_tokens", "temperature", "top_p",
        "top_k", "seed", "output_file",
    ),
    target="--model",
    dataset="--dataset --dataset-name",
)  # fmt: skip
FOR_SERVERS = spelled(
    ("timeout_s",), url="--base-url", concurrency="--concurrency --max-concurrency"
)
FOR_PAIRS = spelled(
    ("max_samples", "dtype"),
    verify_block="--block-size",
    draft="--draft-model",
    window="--draft-sliding-window-size",
)
# Servers get the prompts over and over if there are fewer; a pair answers all by default.
DEFAULTS: dict[str, Any] = {
    "num_prompts": 1024,
    "max_new_tokens": 2048,
    "concurrency": "1",
    "thinking": "off",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the figures. Returns the exit status.

    Only the first rank prints warnings and figures. Every rank prints its own error: torchrun ends
    all ranks when the first one fails.
    """
    argv = sys.argv[1:] if argv is None else argv
    reach_this_machine()
    parser = command_line()
    values = given(parser.parse_args(argv), PublishedSettings)
    if not {"backend", "target"} <= set(values):
        parser.error("--backend and --model are required")
    try:
        settings = settings_of(values)
        if settings.output_file is not None:
            check_writable("output_file", Path(settings.output_file))
        is_first = os.environ.get("RANK", "0") == "0"
        # One data set or one file, shuffled by the seed.
        ((name, prompts),) = load_prompts(settings, datasets.ALL).items()
        for line in without_effect(settings, values, name, prompts) if is_first else ():
            print(f"warning: {line}", file=sys.stderr)
        if settings.backend == "transformers":
            # As in `sglang-dflash generate`.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            from sglang_dflash.tools.bench.published_pair import measure_pair

            measured = measure_pair(settings, name, prompts)
        else:
            measured = measure_server(settings, name, prompts)
        if measured is not None:
            show(settings, *measured)
    except ConfigError as error:
        message = str(error.named(flag_names(parser, argv)))
    except Failed as error:
        message = str(error)
    else:
        return 0
    print(f"sglang_dflash.benchmark: {message}", file=sys.stderr)
    return 1


def command_line() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_dflash.benchmark",
        description="Throughput and acceptance length of a running server, or of a pair over "
        "Transformers (torchrun shares the prompts out over ranks).",
    )
    counts = {**DEFAULTS, "num_prompts": f"{DEFAULTS['num_prompts']}; all for transformers"}
    add_flags(parser, PublishedSettings, FOR_ALL, counts)
    parser.add_argument(
        "--enable-thinking",
        dest="thinking",
        action="store_const",
        const="on",
        default=argparse.SUPPRESS,
        help="of the chat template, which is told not to think otherwise",
    )
    servers = parser.add_argument_group("for sglang and vllm")
    add_flags(servers, PublishedSettings, FOR_SERVERS, DEFAULTS)
    add_flags(parser.add_argument_group("for transformers"), PublishedSettings, FOR_PAIRS)
    return parser


def settings_of(fields: Mapping[str, Any]) -> PublishedSettings:
    """Make the settings. Raises ConfigError if a value is out of range or does not fit another."""
    of_all = {"num_prompts": datasets.ALL} if fields["backend"] == "transformers" else {}
    settings = PublishedSettings(**{**DEFAULTS, **of_all, **fields})
    if not settings.dataset and settings.dataset_file is None:
        raise ConfigError("dataset", required="missing; give it or {dataset_file}")
    for field, chosen in (("dataset", settings.dataset), ("concurrency", settings.levels)):
        if len(chosen) > 1:
            raise ConfigError(field, getattr(settings, field), "only one is measured at a time")
    if settings.backend == "transformers" and settings.draft is None:
        required = "missing; the draft of {target}, a folder or a hub name, is required"
        raise ConfigError("draft", required=required)
    return settings


def without_effect(
    settings: PublishedSettings, fields: Mapping[str, Any], name: str, prompts: Sequence[Prompt]
) -> list[str]:
    """Return a line for each flag that was given and has no effect.

    Args:
        name, prompts: the data set.
    """
    unread = FOR_SERVERS if settings.backend == "transformers" else FOR_PAIRS
    lines = [
        f"{names.split()[0]} has no effect with --backend {settings.backend}"
        for name, names in unread.items()
        if name in fields
    ]
    if settings.thinking == "on" and not any(prompt.chat for prompt in prompts):
        texts = "its prompts are texts to continue, without a chat template"
        lines.append(f"--enable-thinking has no effect on {name}: {texts}")
    return lines


def show(
    settings: PublishedSettings,
    result: dict[str, Any],
    lines: list[str],
    answers: list[dict[str, Any]],
) -> None:
    """Print the summary. Write figures and answers to `settings.output_file` if it is given."""
    print("\n".join(lines))
    if settings.output_file is not None:
        text = json.dumps({**result, "answers": answers}, indent=1)
        Path(settings.output_file).write_text(text + "\n")


def measure_server(
    settings: PublishedSettings, name: str, available: list[Prompt]
) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """The figures of a running server, its summary, and the answers.

    Raises:
        ConfigError: the tokenizer is not available.
        Failed: the server refused a request or broke off.
    """
    count, (concurrency,) = settings.num_prompts, settings.levels
    # Only first turns are sent. Warm-up prompts are not measured, unless the data set is small.
    first_turns = (prompt._replace(turns=prompt.turns[:1]) for prompt in cycle(available))
    prompts = list(islice(first_turns, concurrency + count))
    server = _endpoint(settings)
    # vLLM applies its chat template itself; SGLang's own API takes token ids.
    tokenizer = settings.target if settings.backend == "sglang" else None
    encode = datasets.encoder(tokenizer, settings.thinking)

    def make_ask(max_new_tokens: int) -> Ask:
        return lambda server, prompt, answers: server.ask(
            encode(prompt, answers), max_new_tokens, False
        )

    if not server.flush():
        print("warning: the server's prefix cache could not be emptied", file=sys.stderr)
    if len(available) < len(prompts):
        print(
            f"warning: {name} has {len(available)} prompts, which repeat; repeated ones hit the "
            "server's prefix cache",
            file=sys.stderr,
        )
    load.run(server, prompts[:concurrency], concurrency, make_ask(settings.warm_up_tokens))
    with progress_bar(count) as bar:
        ask = make_ask(settings.max_new_tokens)
        bench_pass = load.run(server, prompts[concurrency:], concurrency, ask, bar.update)
    result = server_figures(settings, name, bench_pass)
    answers = [{"text": answer.text, "tokens": answer.tokens} for answer in bench_pass.all_answers]
    return result, server_lines(result), answers


def _endpoint(settings: PublishedSettings) -> Endpoint:
    """Return the endpoint. Raises Failed if the server is not of the backend's kind."""
    server = load.endpoint(settings.url)
    if settings.backend == "vllm":
        thinking = settings.thinking == "on"
        model = settings.target or ""
        sampling = settings.sampling(load.OpenAI.SEED)
        return load.OpenAI(server.url, model, sampling, settings.timeout_s, thinking)
    if not isinstance(server, load.SGLang):
        raise Failed(
            f"{settings.url}: no SGLang server, but one of the OpenAI API; give --backend vllm"
        )
    return load.SGLang(server.url, settings.sampling(load.SGLang.SEED), settings.timeout_s)


def server_figures(
    settings: PublishedSettings, dataset: str, bench_pass: BenchPass
) -> dict[str, Any]:
    """The figures of a pass, by name. Times of single tokens and answers are in ms."""
    lengths = [
        answer.tokens / answer.verify_steps
        for answer in bench_pass.all_answers
        if answer.verify_steps
    ]
    return {
        "backend": settings.backend,
        "model": settings.target,
        "dataset": dataset,
        "num_prompts": settings.num_prompts,
        "concurrency": settings.levels[0],
        "latency_s": bench_pass.seconds,
        "output_tokens": bench_pass.tokens,
        "output_tok_s": bench_pass.tokens_per_second,
        "acceptance_length": bench_pass.speculation.acceptance_length,
        "spec_accept_length": float(np.mean(lengths)) if lengths else None,
        "verify_steps": bench_pass.speculation.steps,
        **report.percentiles(bench_pass.all_answers),
    }


def server_lines(result: dict[str, Any]) -> list[str]:
    """The published summary, then latencies."""
    lines = [
        f"Backend:          {result['backend']}",
        f"Dataset:          {result['dataset']}",
        f"Num prompts:      {result['num_prompts']}",
        f"Concurrency:      {result['concurrency']}",
        f"Latency:          {result['latency_s']:.1f}s",
        f"Output tokens:    {result['output_tokens']}",
        f"Throughput:       {result['output_tok_s']:,.2f} tok/s",
    ]
    if result["acceptance_length"] is not None:
        lines += [
            f"Accept length:    {result['acceptance_length']:.3f}",
            f"SGLang's own:     {result['spec_accept_length']:.3f} (spec_accept_length, the mean "
            "over answers: the prefill's token is counted)",
            f"Spec verify ct:   {result['verify_steps']}",
        ]
    for name, title in report.TIMES.items():
        lines.append(f"{title} p50/p95/p99: {report.times(result, name)}")
    rule = "=" * 50
    return [rule, *lines, rule]
