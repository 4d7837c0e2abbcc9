"""The benchmark over Transformers: the prompts shared out over ranks, one report by the first."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_dflash.bench.compare import WARM_UP_TOKENS
from sglang_dflash.bench.progress import Silent, shown
from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.benchmark import prompts as of_dataset
from sglang_dflash.benchmark import summary
from sglang_dflash.benchmark.arguments import Settings
from sglang_dflash.benchmark.group import Group, joined
from sglang_dflash.benchmark.pair import Measured, Runner
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.drafting.options import Options
from sglang_dflash.transformers_loop.arguments import GenerateArgs
from sglang_dflash.transformers_loop.generate import load
from sglang_dflash.transformers_loop.threads import threads_for


def main(settings: Settings) -> None:
    """Measure, print, and write `output_file`; on rank 0 of those that torchrun has started.

    Raises:
        ConfigError: the data set or a model is not available, or the two models do not fit.
    """
    with joined() as group:
        known = group.from_first(lambda: of_dataset.available(settings))
        limits = [n for n in (settings.max_samples, settings.num_prompts) if n is not None]
        prompts = known[: min(limits, default=len(known))]
        measured, block_size = _measure(settings, group, prompts)
        everything = group.gather(measured)
    if everything is None:
        return
    everything.sort(key=lambda one: (one.prompt, one.turn))
    result = figures(settings, group.size, block_size, everything)
    print("\n".join(lines(result)))
    if settings.output_file is not None:
        answers = [
            {"prompt": one.prompt, "turn": one.turn, "tokens": one.tokens, "text": one.text}
            for one in everything
        ]
        path = Path(settings.output_file)
        path.write_text(json.dumps({**result, "answers": answers}, indent=1) + "\n")


def _measure(settings: Settings, group: Group, prompts: list[Prompt]) -> tuple[list[Measured], int]:
    """This rank's answers, and the block size."""
    options = Options(block_size=settings.block_size, window=settings.draft_sliding_window_size)
    pair = load(
        GenerateArgs(
            target=settings.model,
            draft=settings.draft_model or "",
            prompt=prompts[0].turns[0],
            options=options,
            dtype=settings.dtype,
            device=_device(settings, group),
        )
    )
    runner = Runner(settings, pair, options)
    own = range(group.rank, len(prompts), group.size)
    measured: list[Measured] = []
    bar = shown(len(own)) if group.rank == 0 else nullcontext(Silent())
    with threads_for(pair.target, pair.draft), bar as progress:
        progress.describe("warming up")
        runner.warm_up(prompts[0], min(WARM_UP_TOKENS, settings.max_new_tokens))
        progress.describe(
            settings.source if group.size == 1 else f"{settings.source}, rank 1 of {group.size}"
        )
        for index in own:
            measured += runner.converse(index, prompts[index])
            progress.advance()
    return measured, options.resolve(pair.draft.config).block_size


def _device(settings: Settings, group: Group) -> str | None:
    """As asked for; otherwise a GPU for each rank of this machine, or the CPU."""
    if settings.device is None and torch.cuda.is_available():
        return f"cuda:{group.local_rank}"
    return settings.device


def figures(
    settings: Settings, ranks: int, block_size: int, measured: list[Measured]
) -> dict[str, Any]:
    """The figures of all answers, by name."""
    plain, dflash = ([getattr(one, at) for one in measured] for at in ("plain_s", "dflash_s"))
    speedups = [a / b for a, b in zip(plain, dflash, strict=True)]
    kept = [count for one in measured for count in one.committed]
    means = [float(np.mean(one.accepted)) for one in measured if one.accepted]
    same = [one.same for one in measured if one.same is not None]
    return {
        "backend": settings.backend,
        "model": settings.model,
        "draft_model": settings.draft_model,
        "dataset": settings.source,
        "ranks": ranks,
        "answer_count": len(measured),
        "output_tokens": sum(len(one.tokens) for one in measured),
        "baseline_tok_s": 1 / float(np.mean(plain)),
        "dflash_tok_s": 1 / float(np.mean(dflash)),
        "speedup": float(np.mean(plain) / np.mean(dflash)),
        "speedup_range": [min(speedups), max(speedups)],
        "acceptance_length": VerifySteps(len(kept), sum(kept)).acceptance_length,
        "average_acceptance_length": float(np.mean(means)) if means else None,
        "acceptance_length_histogram": summary.histogram(kept, block_size),
        "verify_steps": len(kept),
        "same_answers": sum(same) if same else None,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The published summary."""
    low, high = result["speedup_range"]
    found = [
        f"Baseline throughput: {result['baseline_tok_s']:.2f} tok/s",
        f"DFlash throughput:  {result['dflash_tok_s']:.2f} tok/s",
        f"Decoding speedup: {result['speedup']:.2f} (of single answers: {low:.2f} to {high:.2f})",
    ]
    if result["acceptance_length"] is not None:
        found += [
            f"Acceptance length: {result['acceptance_length']:.3f}",
            f"Average Acceptance length: {result['average_acceptance_length']:.3f} (z-lab's: the "
            "mean over answers of their means, with tokens beyond the end of an answer)",
            "Acceptance length histogram: "
            + summary.percent(result["acceptance_length_histogram"]),
        ]
    if result["same_answers"] is not None:
        found.append(
            f"Outputs: {result['same_answers']} of {result['answer_count']} are plain decoding's, "
            "token by token"
        )
    return found
