"""The model card: acceptance, and the target's loss; greedy in float32, on prompts from files that
neither model has seen."""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sglang_dflash.drafting.weights import load_model

from . import figures
from .data import Split
from .target import load_target

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 60, 150, 128


def cut_prompts(
    files: dict[str, str], tokenizer: Tokenizer, count: int, tokens: int, seed: int
) -> list[dict[str, str]]:
    """Pieces of the files of at most `tokens` tokens, whole lines, with the text that follows.

    The files take turns; the place in a file is random. A piece is at least two thirds of `tokens`.
    """
    rng, prompts = random.Random(seed), []
    lines = {name: text.splitlines(keepends=True) for name, text in sorted(files.items())}
    names = [
        name for name, of in lines.items() if len(tokenizer.encode("".join(of)).ids) > 2 * tokens
    ]
    while len(prompts) < count:
        name = names[len(prompts) % len(names)]
        start = rng.randrange(len(lines[name]))
        text, used = "", 0
        for line in lines[name][start:]:
            if len(tokenizer.encode(text + line).ids) > tokens:
                break
            text, used = text + line, used + 1
        rest = "".join(lines[name][start + used :])
        if len(tokenizer.encode(text).ids) * 3 >= 2 * tokens and rest.strip():
            follows = tokenizer.decode(tokenizer.encode(rest).ids[:NEW_TOKENS])
            prompts.append(
                {"file": name, "line": str(start + 1), "prompt": text, "continues": follows}
            )
    return prompts


def write_card(
    out: Path, split: Split, tokenizer: Tokenizer, cpu_seconds: Mapping[str, float]
) -> None:
    """Write `prompts.json` (the demo's prompts), measure, and write `README.md` into `out`.

    `cpu_seconds`: of every training stage.
    """
    prompts = cut_prompts(split.held_out, tokenizer, PROMPTS, PROMPT_TOKENS, seed=4)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    target, draft = load_target(out / "target"), load_model(out / "draft", dtype=torch.float32)
    ids = [tokenizer.encode(item["prompt"]).ids for item in prompts]
    answers = figures.answers_to(draft, target, ids, NEW_TOKENS)
    losses = [figures.mean_loss(target, tokenizer, of) for of in (split.train, split.held_out)]
    sizes = {
        f"{name}_{what}": value
        for name, model in (("target", target), ("draft", draft))
        for what, value in (
            ("parameters", sum(p.numel() for p in model.parameters())),
            ("bytes", sum(p.stat().st_size for p in (out / name).glob("*.safetensors"))),
        )
    }
    text = CARD.format(
        python=platform.python_version(),
        train_files=len(split.train),
        held_out_files=len(split.held_out),
        held_out=", ".join(f"`{name}`" for name in sorted(split.held_out)),
        near_copies=", ".join(f"`{name}`" for name in split.near_copies) or "none",
        digest=split.digest(),
        spent=", ".join(f"{name} {seconds:,.0f}" for name, seconds in cpu_seconds.items()),
        prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        block=draft.config.block_size,
        depth=draft.config.num_hidden_layers,
        target_depth=draft.config.num_target_layers,
        features=", ".join(map(str, draft.config.target_layer_ids)),
        outside=f"{figures.acceptance(answers, in_loops=False):.2f}",
        everywhere=f"{figures.acceptance(answers):.2f}",
        in_loops=f"{figures.loop_share(answers):.0%}",
        train_loss=f"{losses[0]:.2f}",
        held_out_loss=f"{losses[1]:.2f}",
        **sizes,
    )
    (out / "README.md").write_text(text)


CARD = """# The embedded code demo pair

Neither model has seen the files that its prompts are cut from. The target learned library code in
general; the draft learned from what the target writes. So the pair shows what DFlash is worth on
unseen text, with models that fit into a checkout. What the target writes looks like Python and
means little.

| | parameters | bytes (bfloat16) | layers |
|---|---|---|---|
| target | {target_parameters:,} | {target_bytes:,} | {target_depth} |
| draft (block {block}) | {draft_parameters:,} | {draft_bytes:,} | {depth}, reads {features} |

- **Data**: the sources of Python {python}'s standard library, split by file: {train_files} for
  training, {held_out_files} held out, of which neither the target nor the draft nor the tokenizer
  has seen any. Left out of training because they share passages with held-out files: {near_copies}.
  SHA-256 of the split: `{digest}`.
- **Held out**: {held_out}.
- **Training**, CPU seconds on one core: {spent}. The target learns next tokens, then not to repeat
  itself for ever (unlikelihood training against its own loops, arXiv 1908.04319). The draft learns
  from the target's continuations of pieces of the training files, two thirds greedy, one third
  sampled at temperature 0.7, with random anchors and position weights exp(-(k - 1) / 4).
- **License** of the text: the Python Software Foundation License; `prompts.json` holds excerpts of
  it.
- **Loss** of the target in nats per token, on windows of 448 tokens: training files {train_loss},
  held-out files {held_out_loss}.

Acceptance length in tokens per verify step, bonus included, on a CPU, in float32, greedy, on the
{prompts} held-out prompts of `prompts.json` (at most {prompt_tokens} tokens, whole lines),
{new_tokens} new tokens each: {everywhere}, and {outside} outside loops. "Loops" are steps in a tail
that repeats a period of at most 40 tokens at least three times ({in_loops} of the tokens); in loops
any drafter looks good.

Made by `python launch/train_code_pair.py --work WORK --out PAIR`.
"""
