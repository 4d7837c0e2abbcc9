"""The model card of a demo pair: what it is, and acceptance measured by the offline loop, with honest baselines."""

from __future__ import annotations

import json
import platform
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from sglang_dflash.core.model import DraftModel
from sglang_dflash.hf.generation import spec_generate

from . import data
from .target import next_token_loss

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 30, 150, 128


@dataclass
class Figures:
    """Means over one prompt set: tokens per verify step, the same outside repetition loops, and prompt lookup's."""

    acceptance: float
    loop_free: float
    ngram: float
    loop_share: float
    verbatim: float


def cut_prompts(files: dict[str, str], tokenizer: Tokenizer, seed: int) -> list[dict[str, str]]:
    """`PROMPTS` pieces of about `PROMPT_TOKENS` tokens that begin at a line, each with the text that follows it."""
    rng, prompts, names = random.Random(seed), [], sorted(files)
    while len(prompts) < PROMPTS:
        name = names[len(prompts) % len(names)]
        lines = files[name].splitlines(keepends=True)
        if len(lines) < 60:
            names.remove(name)
            continue
        start = rng.randrange(len(lines) - 50)
        ids = tokenizer.encode("".join(lines[start:])).ids
        prompt, rest = (
            tokenizer.decode(ids[:PROMPT_TOKENS]),
            tokenizer.decode(ids[PROMPT_TOKENS : PROMPT_TOKENS + NEW_TOKENS]),
        )
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


def loop_start(tokens: list[int], longest: int = 40, repeats: int = 3) -> int:
    """Where the tail begins that repeats one period of at most `longest` tokens `repeats` times or more; the end if none."""
    for period in range(1, longest + 1):
        n = len(tokens)
        while n > period and tokens[n - 1] == tokens[n - 1 - period]:
            n -= 1
        if len(tokens) - n >= (repeats - 1) * period and len(tokens) - n > period:
            return max(0, n - period)
    return len(tokens)


def prompt_lookup(prompt: list[int], output: list[int], block_size: int) -> list[int]:
    """Tokens per verify step if the drafts were copied from where the last 3 (or 2, or 1) tokens stood before."""
    text, end, committed = prompt + output[:1], len(prompt) + len(output), []
    while len(text) < end:
        drafts: list[int] = []
        for n in (3, 2, 1):
            key = text[-n:]
            found = next(
                (i for i in range(len(text) - n - 1, -1, -1) if text[i : i + n] == key), None
            )
            if found is not None:
                drafts = text[found + n : found + n + block_size - 1]
                break
        truth = (prompt + output)[len(text) : len(text) + block_size]
        accepted = next(
            (i for i, d in enumerate(drafts) if i >= len(truth) - 1 or d != truth[i]), len(drafts)
        )
        committed.append(accepted + 1)
        text += truth[: accepted + 1]
    return committed


@torch.no_grad()
def held_out_loss(target: PreTrainedModel, tokenizer: Tokenizer, files: dict[str, str]) -> float:
    sampler = data.WindowSampler(
        data.token_stream(tokenizer, files), tokenizer, 448, chat_share=0.0
    )
    rng = random.Random(0)
    return sum(next_token_loss(target, sampler.sample(8, rng))[0].item() for _ in range(6)) / 6


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
    sets = {
        "demo prompts (learnt by heart)": cut_prompts(corpus.memorised, tokenizer, seed=3),
        "held-out files": cut_prompts(corpus.held_out, tokenizer, seed=4),
    }
    (out / "prompts.json").write_text(
        json.dumps(sets["demo prompts (learnt by heart)"], indent=1) + "\n"
    )
    rows = []
    for name, prompts in sets.items():
        f = measure(draft, target, tokenizer, prompts)
        rows.append(
            f"| {name} | {f.acceptance} | {f.loop_free} | {f.ngram} | {f.loop_share:.0%} | {f.verbatim} |"
        )
    sizes = {
        m: sum(p.stat().st_size for p in (out / m).glob("*.safetensors"))
        for m in ("target", "draft")
    }
    losses = {
        part: held_out_loss(target, tokenizer, getattr(corpus, part))
        for part in ("memorised", "general", "held_out")
    }
    text = CARD.format(
        kind=kind, rows="\n".join(rows), python=platform.python_version(), files=", ".join(f"`{n}`" for n in data.MEMORISED),
        target_parameters=sum(p.numel() for p in target.parameters()), draft_parameters=sum(p.numel() for p in draft.parameters()),
        target_bytes=sizes["target"], draft_bytes=sizes["draft"], block=draft.config.block_size, prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, **{f"loss_{k}": v for k, v in losses.items()}, **facts,
    )  # fmt: skip
    (out / "README.md").write_text(text)


CARD = """# The embedded {kind} demo pair

A **memorised-text demo**: the target has learnt seven standard-library files by heart and the draft was trained on the same
text. It shows that the mechanism works and what it costs; it says nothing about how well a draft generalises. The held-out
row below is the honest counterpart.

| | parameters | bytes (bfloat16) |
|---|---|---|
| target | {target_parameters:,} | {target_bytes:,} |
| draft (block size {block}) | {draft_parameters:,} | {draft_bytes:,} |

- **Data**: the sources of Python {python}'s standard library. Learnt by heart: {files}.
  The rest is general text, but for the held-out files, which neither model has seen.
- **Loss** (nats per token, windows of 448): learnt by heart {loss_memorised:.2f}, general {loss_general:.2f}, held out {loss_held_out:.2f}.
- **Training**: {training}
- **Licence** of the text: the Python Software Foundation License; `prompts.json` holds excerpts of it.

Acceptance length: tokens per verify step, bonus included; greedy, float32, {prompts} prompts of {prompt_tokens} tokens,
{new_tokens} new tokens each.

| prompts | DFlash | outside repetition loops | n-gram lookup | tokens in loops | verbatim tokens |
|---|---|---|---|---|---|
{rows}

"Outside repetition loops" leaves out steps in a tail that repeats a period of at most 40 tokens: a small model that loops makes any
drafter look good. "n-gram lookup" copies what followed the last 3 (2, 1) tokens before. "Verbatim" counts how many of the new
tokens are the file's own.

Made by `python launch/train_demo.py --kind {kind} --work WORK --out launch/demo_models/{kind}`.
"""
