"""Acceptance length against context length, by draft window and sinks: a table and a picture.

Over Transformers, greedy, float32: standard-library source up to the context length, then a demo
prompt, then `NEW_TOKENS` generated. The demo pairs were trained on up to 448 tokens at a time: the
figures show what happens beyond a draft's training length, with and without a window, not what a
draft trained on long contexts does. All settings must give the same tokens, or nothing is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.conversations import long_text, texts
from experiments.runner import Arms, Experiment, Progress, case_by_case, option
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.facts.embedded import demo_pair

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
SETTINGS = {
    "no window": DraftOptions(),
    "window 512": DraftOptions(window=512),
    "window 512, 4 sinks": DraftOptions(window=512, sinks=4),
    "window 2048": DraftOptions(window=2048),
    "window 2048, 4 sinks": DraftOptions(window=2048, sinks=4),
}
NEW_TOKENS = 64

# Context length -> setting -> acceptance length.
Lengths = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Options:
    model: str = option("dense", "which embedded pair")
    prompts: int = option(4, "demo prompts per context length")


def workload(_: Arms, options: Options, progress: Progress) -> Lengths:
    import torch
    from transformers import AutoModelForCausalLM

    from sglang_dflash.drafting.weights import load_model

    pair = demo_pair(options.model)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    draft = load_model(str(pair.draft), dtype=torch.float32)
    pieces, text = texts(pair)[: options.prompts], long_text(pair, max(CONTEXTS))
    prompts = {
        str(context): [text[: context - len(piece)] + piece for piece in pieces]
        for context in CONTEXTS
    }
    return case_by_case(
        prompts,
        lambda _, of_length: acceptance(draft, target, of_length),
        lambda context, *of: progress(f"{context} tokens", *of),
    )


def acceptance(draft: Any, target: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Acceptance length by setting. Raises RuntimeError if two settings give different tokens."""
    import torch

    from sglang_dflash.transformers_loop.generation import prefill, spec_generate

    committed: dict[str, list[int]] = {name: [] for name in SETTINGS}
    for prompt in prompts:
        read = prefill(draft, target, torch.tensor([prompt]))
        done = {
            name: spec_generate(draft, target, read, NEW_TOKENS, options=options)
            for name, options in SETTINGS.items()
        }
        if len({tuple(one.tokens) for one in done.values()}) != 1:
            raise RuntimeError(
                f"after {len(prompt)} tokens the settings give different outputs: "
                "no figure without exactness"
            )
        for name, one in done.items():
            committed[name] += one.committed
    return {name: round(sum(steps) / len(steps), 3) for name, steps in committed.items()}


def report(lengths: Lengths, _: Options) -> dict[str, Any]:
    return {"new_tokens": NEW_TOKENS, "acceptance_length": lengths}


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'context':>8}  " + "".join(f"{name:>22}" for name in SETTINGS)]
    for context, row in result["acceptance_length"].items():
        lines.append(f"{context:>8}  " + "".join(f"{row[name]:22.3f}" for name in SETTINGS))
    return lines


def picture(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, name in enumerate(SETTINGS):
        axes.plot(
            CONTEXTS,
            [result["acceptance_length"][str(context)][name] for context in CONTEXTS],
            label=name,
            marker="ox+s^"[i],
            linestyle="--" if "sinks" in name else "-",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONTEXTS, [str(context) for context in CONTEXTS])
    axes.set(
        xlabel="context length (tokens)",
        ylabel="acceptance length (tokens per verify step)",
        ylim=(0, None),
    )
    axes.set_title(
        "Demo pair, trained on short texts: acceptance by context length and draft window",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


EXPERIMENT = Experiment(
    name="context_length",
    description=__doc__,
    options=Options,
    workload=workload,
    report=report,
    table=table,
    picture=picture,
)
