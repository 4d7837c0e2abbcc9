"""The published benchmark over Transformers: plain decoding and DFlash on the same prompts, timed
without the prefill. The ranks of torchrun share the prompts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed

from sglang_dflash.common.progress import progress_bar
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.drafting.options import Options
from sglang_dflash.tools.bench.datasets import Prompt, encode_turn
from sglang_dflash.tools.bench.published_settings import PublishedSettings
from sglang_dflash.tools.transformers_loop.generation import (
    Generation,
    Prefill,
    Sampler,
    prefill,
    spec_generate,
)
from sglang_dflash.tools.transformers_loop.pair import LoadedPair, load
from sglang_dflash.tools.transformers_loop.target_cache import TargetCache

T = TypeVar("T")


@dataclass(frozen=True)
class PairAnswer:
    """One turn of a prompt.

    Attributes:
        tokens: DFlash's answer; its first token comes from the prefill.
        committed: number of the answer's tokens from each verify step.
        same: whether plain decoding gives the same answer.
        plain_s, dflash_s: seconds per token, without the target's prefill.
    """

    prompt: int
    turn: int
    text: str
    tokens: list[int]
    committed: list[int]
    same: bool
    plain_s: float
    dflash_s: float


def measure_pair(
    settings: PublishedSettings, name: str, available: list[Prompt]
) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]] | None:
    """Measure a pair. Returns figures, their summary and the answers; None except on rank 0.

    Args:
        name, known: the data set and its prompts.

    Raises:
        ConfigError: a model is not available, or the two models do not fit.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    prompts = available[: min(settings.num_prompts, settings.max_samples or len(available))]
    measured, verify_block = _measure(settings, rank, ranks, prompts)
    everything: list[Any] = [measured]
    if ranks > 1:
        # Ranks exchange objects, by gloo on any device.
        distributed.init_process_group(backend="gloo")
        everything = [None] * ranks
        distributed.gather_object(measured, everything if rank == 0 else None, dst=0)
        distributed.destroy_process_group()
    if rank:
        return None
    answers_of_all = [answer for answers_of_rank in everything for answer in answers_of_rank]
    answers_of_all.sort(key=lambda answer: (answer.prompt, answer.turn))
    result = pair_figures(settings, name, ranks, verify_block, answers_of_all)
    answers = [
        {"prompt": answer.prompt, "turn": answer.turn, "tokens": answer.tokens, "text": answer.text}
        for answer in answers_of_all
    ]
    return result, pair_lines(result), answers


def _measure(
    settings: PublishedSettings, rank: int, ranks: int, prompts: list[Prompt]
) -> tuple[list[PairAnswer], int]:
    """Return this rank's answers, and the number of tokens that a step verifies."""
    options = Options(verify_block=settings.verify_block, window=settings.window)
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else None
    dtype = None if settings.dtype == "auto" else settings.dtype
    pair = load(settings.target or "", settings.draft or "", options, dtype, device)
    indices = range(rank, len(prompts), ranks)
    measured: list[PairAnswer] = []
    progress = progress_bar(len(indices)) if rank == 0 else nullcontext()
    with progress as bar:
        answer_turn(settings, pair, options, 0, prompts[0], [], settings.warm_up_tokens)
        for index in indices:
            # A turn continues DFlash's answers to those before it.
            answers: list[str] = []
            for _ in prompts[index].turns:
                limit = settings.max_new_tokens
                answer = answer_turn(settings, pair, options, index, prompts[index], answers, limit)
                measured.append(answer)
                answers.append(answer.text)
            if bar is not None:
                bar.update()
    return measured, options.resolve(pair.draft.config).verify_block


@torch.inference_mode()
def plain_generate(
    target: Any, start: Prefill, max_new_tokens: int, stops: tuple[int, ...], choose: Sampler
) -> list[int]:
    """Decode token by token after a prefill. The prefill's cache is rolled back at the end."""
    length = len(start.target_hidden)
    at = torch.tensor([length - 1], device=start.logits.device)
    cache, next_token = TargetCache(target, start.kv), choose(start.logits, at)
    tokens = next_token.tolist()
    while len(tokens) < max_new_tokens and tokens[-1] not in stops:
        out = target(input_ids=next_token[None], past_key_values=cache.cache, use_cache=True)
        next_token = choose(out.logits[0], at + len(tokens))
        tokens += next_token.tolist()
    cache.reset(length)
    return tokens


def answer_turn(
    settings: PublishedSettings,
    pair: LoadedPair,
    options: Options,
    index: int,
    prompt: Prompt,
    answers: list[str],
    limit: int,
) -> PairAnswer:
    """Answer the next turn of prompt `index` by both ways of decoding, `limit` tokens at most."""
    stops = pair.stop_token_ids
    ids = encode_turn(pair.tokenizer, prompt, answers, settings.thinking)
    start = prefill(pair.draft, pair.target, torch.tensor([ids], device=pair.draft.device))

    # The seed depends on the prompt, not on the rank that answers it.
    seed = settings.seed + index
    choose = Sampler(settings.temperature, settings.top_k or 0, settings.top_p, seed)

    def plain() -> list[int]:
        return plain_generate(pair.target, start, limit, stops, choose)

    def dflash() -> Generation:
        return spec_generate(
            pair.draft,
            pair.target,
            start,
            limit,
            options=options,
            stop_token_ids=stops,
            choose=choose,
        )

    # The order changes from prompt to prompt, like the arms of `sglang-dflash bench`.
    if index % 2:
        out, dflash_s = time_run(dflash, pair.draft.device)
        tokens, plain_s = time_run(plain, pair.draft.device)
    else:
        tokens, plain_s = time_run(plain, pair.draft.device)
        out, dflash_s = time_run(dflash, pair.draft.device)
    return PairAnswer(
        index,
        len(answers),
        pair.tokenizer.decode(out.tokens, skip_special_tokens=True),
        out.tokens,
        out.committed,
        tokens == out.tokens,
        plain_s / len(tokens),
        dflash_s / len(out.tokens),
    )


def time_run(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return the result of `run` and its seconds on the device."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = run()
    if on_gpu:
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def pair_figures(
    settings: PublishedSettings,
    dataset: str,
    ranks: int,
    verify_block: int,
    measured: list[PairAnswer],
) -> dict[str, Any]:
    """The figures of all answers, by name."""
    plain, dflash = ([getattr(answer, at) for answer in measured] for at in ("plain_s", "dflash_s"))
    speedups = [a / b for a, b in zip(plain, dflash, strict=True)]
    committed = [count for answer in measured for count in answer.committed]
    means = [float(np.mean(answer.committed)) for answer in measured if answer.committed]
    counts = np.bincount(np.array(committed, dtype=int), minlength=verify_block + 1)
    return {
        "backend": settings.backend,
        "model": settings.target,
        "draft_model": settings.draft,
        "dataset": dataset,
        "ranks": ranks,
        "answer_count": len(measured),
        "output_tokens": sum(len(answer.tokens) for answer in measured),
        "baseline_tok_s": 1 / float(np.mean(plain)),
        "dflash_tok_s": 1 / float(np.mean(dflash)),
        "speedup": float(np.mean(plain) / np.mean(dflash)),
        "speedup_range": [min(speedups), max(speedups)],
        "acceptance_length": VerifySteps(len(committed), sum(committed)).acceptance_length,
        "average_acceptance_length": float(np.mean(means)) if means else None,
        # The share of steps that kept 0, 1, ... tokens.
        "acceptance_length_histogram": (counts / max(1, len(committed))).tolist(),
        "verify_steps": len(committed),
        "same_answers": sum(answer.same for answer in measured),
    }


def pair_lines(result: dict[str, Any]) -> list[str]:
    """The published summary."""
    low, high = result["speedup_range"]
    lines = [
        f"Baseline throughput: {result['baseline_tok_s']:.2f} tok/s",
        f"DFlash throughput:  {result['dflash_tok_s']:.2f} tok/s",
        f"Decoding speedup: {result['speedup']:.2f} (of single answers: {low:.2f} to {high:.2f})",
    ]
    if result["acceptance_length"] is not None:
        shares = [f"{100 * share:.1f}%" for share in result["acceptance_length_histogram"]]
        lines += [
            f"Acceptance length: {result['acceptance_length']:.3f}",
            f"Average Acceptance length: {result['average_acceptance_length']:.3f} (the mean over "
            "answers of their means, as z-lab's)",
            f"Acceptance length histogram: {shares}",
        ]
    lines.append(
        f"Outputs: {result['same_answers']} of {result['answer_count']} are plain decoding's, "
        "token by token"
    )
    return lines
