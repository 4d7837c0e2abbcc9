"""The model card of a demo pair: facts, and acceptance by the offline loop beside baselines."""

from __future__ import annotations

import json
import platform
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.transformers_loop.generation import spec_generate

from . import data
from .figures import loop_start, mean_loss, prompt_lookup

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 30, 150, 128


@dataclass
class Figures:
    """Means over one prompt set.

    Attributes:
        acceptance: tokens per verify step.
        loop_free: the same outside repetition loops.
        ngram: tokens per verify step of prompt lookup.
        loop_share: share of the new tokens that are in repetition loops.
        verbatim: leading new tokens that continue the file.
    """

    acceptance: float
    loop_free: float
    ngram: float
    loop_share: float
    verbatim: float


def cut_prompts(files: dict[str, str], tokenizer: Tokenizer, seed: int) -> list[dict[str, str]]:
    """`PROMPTS` pieces of about `PROMPT_TOKENS` tokens, each with the text that follows it.

    Pieces begin at the start of a line.
    """
    rng, prompts, names = random.Random(seed), [], sorted(files)
    while len(prompts) < PROMPTS:
        name = names[len(prompts) % len(names)]
        lines = files[name].splitlines(keepends=True)
        if len(lines) < 60:
            names.remove(name)
            continue
        start = rng.randrange(len(lines) - 50)
        ids = tokenizer.encode("".join(lines[start:])).ids
        prompt = tokenizer.decode(ids[:PROMPT_TOKENS])
        rest = tokenizer.decode(ids[PROMPT_TOKENS : PROMPT_TOKENS + NEW_TOKENS])
        if len(ids) >= PROMPT_TOKENS + NEW_TOKENS:
            prompts.append(
                {"file": name, "line": str(start + 1), "prompt": prompt, "continues": rest}
            )
    return prompts


def measure(
    draft: DraftModel, target: PreTrainedModel, tokenizer: Tokenizer, prompts: list[dict[str, str]]
) -> Figures:
    """Greedy float32 decoding of every prompt with the offline loop."""
    steps, loop_free, ngram, looped, verbatim = [], [], [], 0, 0
    for item in prompts:
        prompt = tokenizer.encode(item["prompt"]).ids
        out = spec_generate(draft, target, torch.tensor([prompt]), NEW_TOKENS)
        start = loop_start(out.tokens)
        looped += len(out.tokens) - start
        follows = tokenizer.encode(item["continues"]).ids
        verbatim += next(
            (i for i, (a, b) in enumerate(zip(out.tokens, follows, strict=False)) if a != b),
            len(follows),
        )
        done = 1
        for count in out.committed:
            steps.append(count)
            if done < start:
                loop_free.append(count)
            done += count
        ngram += prompt_lookup(prompt, out.tokens, draft.config.block_size)

    def mean(values: list[int]) -> float:
        return round(sum(values) / max(1, len(values)), 2)

    total = NEW_TOKENS * len(prompts)
    return Figures(
        mean(steps),
        mean(loop_free),
        mean(ngram),
        round(looped / total, 3),
        round(verbatim / len(prompts), 1),
    )


def write_card(
    kind: str,
    corpus: data.Corpus,
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: Tokenizer,
    out: Path,
    facts: dict[str, str],
) -> None:
    """Measure the pair and write `prompts.json` (the demo's prompts) and `README.md` into `out`."""
    demo = cut_prompts(corpus.memorized, tokenizer, seed=3)
    sets = {
        "demo prompts (memorized)": demo,
        "held-out files": cut_prompts(corpus.held_out, tokenizer, seed=4),
    }
    (out / "prompts.json").write_text(json.dumps(demo, indent=1) + "\n")
    rows = []
    for name, prompts in sets.items():
        f = measure(draft, target, tokenizer, prompts)
        cells = (name, f.acceptance, f.loop_free, f.ngram, f"{f.loop_share:.0%}", f.verbatim)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    losses = [
        f"{part} {mean_loss(target, tokenizer, files):.2f}"
        for part, files in (
            ("memorized", corpus.memorized),
            ("general", corpus.general),
            ("held out", corpus.held_out),
        )
    ]
    text = CARD.format(
        kind=kind,
        rows="\n".join(rows),
        python=platform.python_version(),
        files=", ".join(f"`{name}`" for name in data.MEMORIZED),
        target_parameters=sum(p.numel() for p in target.parameters()),
        draft_parameters=sum(p.numel() for p in draft.parameters()),
        target_bytes=weight_bytes(out / "target"),
        draft_bytes=weight_bytes(out / "draft"),
        block=draft.config.block_size,
        prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        losses=", ".join(losses),
        **facts,
    )
    (out / "README.md").write_text(text)


def weight_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


CARD = """# The embedded {kind} demo pair

A **memorized-text demo**: the target has memorized seven standard-library files and the draft was
trained on the same text. It shows that the mechanism works and what it costs, not how well a draft
generalizes. For that, see the held-out row below.

| | parameters | bytes (bfloat16) |
|---|---|---|
| target | {target_parameters:,} | {target_bytes:,} |
| draft (block size {block}) | {draft_parameters:,} | {draft_bytes:,} |

- **Data**: the sources of Python {python}'s standard library. Memorized:
  {files}.
  The rest is general text, except for the held-out files, which neither model was trained on.
- **Loss** (nats per token, windows of 448): {losses}.
- **Training**: {training}
- **License** of the text: the Python Software Foundation License; `prompts.json` holds excerpts of
  it.

Acceptance length: tokens per verify step, bonus included; greedy, float32, {prompts} prompts of
{prompt_tokens} tokens, {new_tokens} new tokens each.

| prompts | DFlash | outside repetition loops | n-gram lookup | tokens in loops | verbatim tokens |
|---|---|---|---|---|---|
{rows}

"Outside repetition loops" leaves out steps in a tail that repeats a period of at most 40 tokens: a
small model that loops makes any drafter look good. "n-gram lookup" copies what followed the last
earlier occurrence of the last 3 (2, 1) tokens. "Verbatim" counts the new tokens that are the
file's own.

Made by `python launch/train_demo.py --kind {kind} --work WORK --out launch/demo_models/{kind}`.
"""
