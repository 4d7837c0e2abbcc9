"""The benchmark of a running server: SGLang by its own API, vLLM by the OpenAI API."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflash.bench import load, report
from sglang_dflash.bench.compare import WARM_UP_TOKENS
from sglang_dflash.bench.encoding import Encode, encoder
from sglang_dflash.bench.load import (
    OURS,
    VLLMS,
    Answer,
    Endpoint,
    OpenAI,
    OpenAIChat,
    Pass,
    RequestFailed,
    Sampling,
)
from sglang_dflash.bench.progress import shown
from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.benchmark import prompts as of_dataset
from sglang_dflash.benchmark import summary
from sglang_dflash.benchmark.arguments import (
    BASE_URL,
    CONCURRENCY,
    NUM_PROMPTS,
    TIMEOUT_S,
    Settings,
)
from sglang_dflash.facts.errors import ConfigError


def main(settings: Settings) -> None:
    """Measure, print, and write `output_file`.

    Raises:
        ConfigError: the data set or the tokenizer is not available.
        RequestFailed: the server refused a request or broke off.
    """
    count = settings.num_prompts or NUM_PROMPTS
    concurrency = settings.concurrency or CONCURRENCY
    known = of_dataset.available(settings)
    # Warm-up prompts are not measured, unless the data set is too small.
    prompts = of_dataset.repeated(known, concurrency + count)
    texts, chats = _endpoints(settings)
    encode = _encode(settings)

    def asking(max_new_tokens: int) -> Any:
        def ask(_: Endpoint, prompt: Prompt, answers: list[str]) -> Answer:
            to = chats if prompt.chat else texts
            return to.ask(encode(prompt, answers), max_new_tokens, False)

        return ask

    if not texts.flush():
        _warn("the server's prefix cache could not be emptied")
    if len(known) < len(prompts):
        _warn(
            f"{settings.source} has {len(known)} prompts, which repeat; "
            "repeated ones hit the server's prefix cache"
        )
    few = min(WARM_UP_TOKENS, settings.max_new_tokens)
    load.run(texts, prompts[:concurrency], concurrency, asking(few))
    with shown(count) as progress:
        progress.describe(f"{settings.source}, {concurrency} at a time")
        done = load.run(
            texts,
            prompts[concurrency:],
            concurrency,
            asking(settings.max_new_tokens),
            progress.advance,
        )
    result = figures(settings, count, concurrency, done)
    print("\n".join(lines(result)))
    if settings.output_file is not None:
        answers = [{"text": one.text, "tokens": one.tokens} for (one,) in done.answers]
        path = Path(settings.output_file)
        path.write_text(json.dumps({**result, "answers": answers}, indent=1) + "\n")


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _endpoints(settings: Settings) -> tuple[Endpoint, Endpoint]:
    """Where texts to continue are sent, and where chats are.

    Raises RequestFailed if the server is of another kind than the backend.
    """
    url, timeout = settings.base_url or BASE_URL, settings.timeout_s or TIMEOUT_S
    sampling = Sampling(settings.temperature)
    if settings.temperature:
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k, settings.seed)
    found = load.endpoint(url)
    if settings.backend == "sglang":
        if not isinstance(found, load.SGLang):
            raise RequestFailed(
                f"{url}: no SGLang server, but one of the OpenAI API; give --backend vllm"
            )
        to = load.SGLang(found.url, sampling, timeout)
        return to, to
    to_server = found.url, settings.model, sampling, timeout
    return OpenAI(*to_server), OpenAIChat(*to_server, thinking=settings.enable_thinking)


def _encode(settings: Settings) -> Encode:
    """vLLM applies its chat template itself; SGLang's own API takes token ids."""
    if settings.backend == "vllm":
        return encoder(None, None)
    try:
        return encoder(settings.model, settings.enable_thinking)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--model: {settings.model!r} has no tokenizer that can be loaded ({first_line}); "
            "the folder or hub name that the server serves is required"
        ) from error


def figures(settings: Settings, count: int, concurrency: int, done: Pass) -> dict[str, Any]:
    """The figures of a pass, by name. Times of single tokens and answers are in ms."""
    answers = [answer for turns in done.answers for answer in turns]
    length = done.speculation.acceptance_length
    own = [one.tokens / one.verify_steps for one in answers if one.verify_steps]
    counts = _added([one.correct_drafts for one in answers])
    row = report.row([done])
    return {
        "backend": settings.backend,
        "model": settings.model,
        "dataset": settings.source,
        "num_prompts": count,
        "concurrency": concurrency,
        "latency_s": done.seconds,
        "output_tokens": done.tokens,
        "output_tok_s": done.tokens / done.seconds,
        "acceptance_length": length if done.definition == OURS else None,
        VLLMS: length if done.definition == VLLMS else None,
        "spec_accept_length": float(np.mean(own)) if own else None,
        "verify_steps": done.speculation.steps,
        # A step that agrees with i drafted tokens commits i + 1.
        "acceptance_length_histogram": [0.0, *summary.shares(counts)] if counts else None,
        **{
            key: row[key]
            for name in report.LATENCIES
            for key in (name, f"{name}_p95", f"{name}_p99")
        },
    }


def _added(lists: list[tuple[int, ...]]) -> list[int]:
    """Lists of counts added up entry by entry; missing entries are zeros."""
    total = [0] * max(map(len, lists), default=0)
    for one in lists:
        for i, count in enumerate(one):
            total[i] += count
    return total


def lines(result: dict[str, Any]) -> list[str]:
    """The published summary, then latencies."""
    shown = [
        summary.RULE,
        f"Backend:          {result['backend']}",
        f"Dataset:          {result['dataset']}",
        f"Num prompts:      {result['num_prompts']}",
        f"Concurrency:      {result['concurrency']}",
        f"Latency:          {result['latency_s']:.1f}s",
        f"Output tokens:    {result['output_tokens']}",
        f"Throughput:       {result['output_tok_s']:,.2f} tok/s",
    ]
    if result["acceptance_length"] is not None:
        shown.append(f"Accept length:    {result['acceptance_length']:.3f}")
    if result[VLLMS] is not None:
        shown.append(
            f"Accept length:    {result[VLLMS]:.3f} (vLLM's counters: "
            "tokens beyond the end of an answer are counted)"
        )
    if result["spec_accept_length"] is not None:
        shown.append(
            f"SGLang's own:     {result['spec_accept_length']:.3f} (spec_accept_length, the mean "
            "over answers: the prefill's token is counted)"
        )
    if result["verify_steps"]:
        shown.append(f"Spec verify ct:   {result['verify_steps']}")
    if result["acceptance_length_histogram"] is not None:
        shown.append(
            "Acceptance length histogram (as committed, by SGLang's count): "
            + summary.percent(result["acceptance_length_histogram"])
        )
    for name, title in report.LATENCIES.items():
        if result[name] is not None:
            shown.append(f"{title + ':':<28} {report.times(result, name)}")
    return [*shown, summary.RULE]
