"""Acceptance length against context length, by draft window and sinks: a table and a picture.

    python -m benchmarks.context_length [--prompts 4] [--out benchmarks/results/context_length.json]

Over Transformers, greedy, float32: so many tokens of standard-library source, then a demo prompt, then `NEW_TOKENS` generated. The
demo pair was trained on 448 tokens at a time: the figures show what happens beyond a draft's training length, with and without a
window, not what a draft trained on long contexts does. All settings must give the same tokens, or nothing is reported. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.conversations import texts
from benchmarks.long_context import long_text
from sglang_dflash.bench import measure
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.core.options import Options
from sglang_dflash.core.weights import load_model
from sglang_dflash.hf.generation import prefill, spec_generate

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
SETTINGS = {
    "no window": Options(),
    "window 512": Options(window=512),
    "window 512, 4 sinks": Options(window=512, sinks=4),
    "window 2048": Options(window=2048),
    "window 2048, 4 sinks": Options(window=2048, sinks=4),
}
NEW_TOKENS = 64


def acceptance(draft: Any, target: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Acceptance length by setting over the prompts. Raises RuntimeError where two settings give different tokens."""
    committed: dict[str, list[int]] = {name: [] for name in SETTINGS}
    for prompt in prompts:
        read = prefill(draft, target, torch.tensor([prompt]))
        done = {
            name: spec_generate(draft, target, read, NEW_TOKENS, options=options)
            for name, options in SETTINGS.items()
        }
        if len({tuple(one.tokens) for one in done.values()}) != 1:
            raise RuntimeError(
                f"after {len(prompt)} tokens the settings give different outputs: no figure without exactness"
            )
        for name, one in done.items():
            committed[name] += one.committed
    return {name: round(sum(steps) / len(steps), 3) for name, steps in committed.items()}


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, name in enumerate(SETTINGS):
        lengths = [result["acceptance_length"][str(c)][name] for c in CONTEXTS]
        axes.plot(
            CONTEXTS,
            lengths,
            label=name,
            marker="ox+s^"[i],
            linestyle="--" if "sinks" in name else "-",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONTEXTS, [str(c) for c in CONTEXTS])
    axes.set(
        xlabel="context length (tokens)",
        ylabel="acceptance length (tokens per verify step)",
        ylim=(0, None),
    )
    axes.set_title(
        "Demo pair, trained on 448 tokens at a time: acceptance by context length and draft window",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("dense")
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    draft, pieces, text = (
        load_model(str(pair.draft), dtype=torch.float32),
        texts(pair)[: args.prompts],
        long_text(pair, max(CONTEXTS)),
    )
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.context_length --prompts {args.prompts}",
        "hardware": measure.hardware(),
        "new_tokens": NEW_TOKENS,
        "acceptance_length": {},
    }
    print(f"{'context':>8}  " + "".join(f"{name:>22}" for name in SETTINGS))
    for context in CONTEXTS:
        prompts = [text[: context - len(piece)] + piece for piece in pieces]
        row = acceptance(draft, target, prompts)
        result["acceptance_length"][str(context)] = row
        print(f"{context:8}  " + "".join(f"{value:22.3f}" for value in row.values()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        draw(result, args.out.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
