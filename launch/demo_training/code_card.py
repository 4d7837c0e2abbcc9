"""The tables of the `code` pair's model card. Every one is measured here, greedy in float32 unless
it states otherwise, on prompts from files that neither model has seen."""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.transformers_loop.generation import sampler

from . import figures
from .split import Split, load_split
from .target import load_target

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 60, 150, 128
SHORTER = (32, 64)
BLOCKS = (4, 8, 16)
LONG_PROMPTS, LONG_PROMPT_TOKENS = 20, 640
WINDOWS = (128, 256, 512, None)
SEED = 1
CURVE_STEPS = 500


@dataclass
class Pair:
    """A saved pair in float32, with its prompts."""

    target: PreTrainedModel
    draft: DraftModel
    tokenizer: Tokenizer
    prompts: list[list[int]]

    @classmethod
    def load(cls, folder: Path) -> Pair:
        tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
        prompts = json.loads((folder / "prompts.json").read_text())
        return cls(
            load_target(folder / "target"),
            load_model(folder / "draft", dtype=torch.float32),
            tokenizer,
            [tokenizer.encode(item["prompt"]).ids for item in prompts],
        )

    @cached_property
    def greedy(self) -> list[figures.Answer]:
        """The greedy answers to all prompts, at the checkpoint's block size and without a window.

        `NEW_TOKENS` tokens each.
        """
        return self.answers()

    def answers(
        self, prompts: Sequence[list[int]] | None = None, new_tokens: int = NEW_TOKENS, **how: Any
    ) -> list[figures.Answer]:
        """One answer per prompt. `how`: of `spec_generate`."""
        return [
            figures.answer(self.draft, self.target, prompt, new_tokens, **how)
            for prompt in prompts or self.prompts
        ]


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


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. Floats get two decimals."""
    shown = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = [head, ["---"] * len(head), *shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def acceptance_table(pair: Pair) -> str:
    """Acceptance length outside and inside loops, beside n-gram lookup, for several lengths."""
    whole, rows = pair.greedy, []
    block = pair.draft.config.block_size
    for tokens in (*SHORTER, NEW_TOKENS):
        answers = [one.begun(tokens) for one in whole]
        lookup = [one.lookup(block) for one in answers]
        rows.append(
            [
                tokens,
                f"{figures.loop_share(answers):.0%}",
                figures.acceptance(answers, loop=False),
                figures.acceptance(lookup, loop=False),
                figures.acceptance(answers),
                figures.acceptance(lookup),
            ]
        )
    head = ["new tokens", "tokens in loops", "outside loops", "lookup, outside loops"]
    return table([*head, "all", "lookup, all"], rows)


def positions_table(pair: Pair) -> str:
    """Share of the steps that accept at least k drafted tokens."""
    answers, block = pair.greedy, pair.draft.config.block_size
    rows = [
        [name, *figures.by_position(answers, block, loop)]
        for name, loop in (("outside loops", False), ("inside loops", True))
    ]
    return table(["k", *map(str, range(1, block))], rows)


def blocks_table(pair: Pair) -> str:
    """The block size at which the draft is run."""
    own, rows = pair.draft.config.block_size, []
    for block in BLOCKS:
        options = Options(block_size=block)
        answers = pair.greedy if block == own else pair.answers(options=options)
        rows.append([block, figures.acceptance(answers, loop=False), figures.acceptance(answers)])
    return table(["block size", "outside loops", "all"], rows)


def windows_table(pair: Pair) -> str:
    """How many committed tokens the draft reads, after long prompts. Its own window is left out."""
    cut = cut_prompts(
        load_split().held_out, pair.tokenizer, LONG_PROMPTS, LONG_PROMPT_TOKENS, seed=5
    )
    prompts = [pair.tokenizer.encode(item["prompt"]).ids for item in cut]
    whole = Pair(pair.target, figures.without_windows(pair.draft), pair.tokenizer, prompts)
    rows = []
    for window in WINDOWS:
        answers = whole.answers(options=Options(window=window))
        counts = [figures.acceptance(answers, loop=False), figures.acceptance(answers)]
        rows.append([window or "all", *counts])
    return table(["window", "outside loops", "all"], rows)


def temperature_table(pair: Pair) -> str:
    """Greedy, and sampled with a seed."""
    generator = torch.Generator().manual_seed(SEED)
    sampled = pair.answers(choose=sampler(1.0, generator=generator))
    rows = [
        [temperature, figures.acceptance(answers, loop=False), figures.acceptance(answers)]
        for temperature, answers in (("0", pair.greedy), ("1", sampled))
    ]
    return table(["temperature", "outside loops", "all"], rows)


def ablation_table(pair: Pair) -> str:
    """The draft with its context K/V zeroed."""
    blind = Pair(pair.target, figures.blinded(pair.draft), pair.tokenizer, pair.prompts)
    rows = []
    for name, of in (("as trained", pair), ("context K/V zeroed", blind)):
        answers = of.greedy
        rows.append([name, figures.acceptance(answers, loop=False), figures.acceptance(answers)])
    return table(["draft", "outside loops", "all"], rows)


def loss_table(pair: Pair) -> str:
    """The target's loss on windows of 448 tokens."""
    parts, rows = load_split(), []
    for name, files in (("training files", parts.train), ("held-out files", parts.held_out)):
        per_token = figures.mean_loss(pair.target, pair.tokenizer, files)
        per_byte = per_token * figures.tokens_per_byte(pair.tokenizer, files)
        rows.append([name, per_token, f"{per_byte:.3f}"])
    return table(["text", "nats per token", "nats per byte"], rows)


TABLES: dict[str, Callable[[Pair], str]] = {
    "acceptance": acceptance_table,
    "positions": positions_table,
    "blocks": blocks_table,
    "windows": windows_table,
    "temperature": temperature_table,
    "ablation": ablation_table,
    "loss": loss_table,
}


def curve_table(history: Sequence[Mapping[str, float]]) -> str:
    """The draft's acceptance on what it learns from, every `CURVE_STEPS` steps."""
    rows = [
        [f"{one['step']:,} of {one['planned']:,}", one["loss"], one["acceptance"]]
        for one in history
        if one["step"] % CURVE_STEPS == 0
    ]
    return table(["steps", "loss", "acceptance length"], rows)


def write_card(
    out: Path,
    split: Split,
    tokenizer: Tokenizer,
    cpu_seconds: Mapping[str, float],
    history: Sequence[Mapping[str, float]],
) -> None:
    """Write `prompts.json` (the demo's prompts), measure, and write `README.md` into `out`.

    `cpu_seconds`: of every training stage. `history`: of the draft's, see `Run.history`.
    """
    prompts = cut_prompts(split.held_out, tokenizer, PROMPTS, PROMPT_TOKENS, seed=4)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    pair = Pair.load(out)
    tables = {}
    for name, make in TABLES.items():
        tables[name] = make(pair)
        print(f"{name}\n{tables[name]}", flush=True)
    spent = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in cpu_seconds.items())
    sizes = {
        f"{name}_{what}": value
        for name, model in (("target", pair.target), ("draft", pair.draft))
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
        spent=spent,
        prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        long_prompts=LONG_PROMPTS,
        long_prompt_tokens=LONG_PROMPT_TOKENS,
        seed=SEED,
        block=pair.draft.config.block_size,
        window=pair.draft.config.layers[0].sliding_window,
        depth=pair.draft.config.num_hidden_layers,
        target_depth=pair.draft.config.num_target_layers,
        features=", ".join(map(str, pair.draft.config.target_layer_ids)),
        curve=curve_table(history),
        **sizes,
        **tables,
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

Every table is made by `python launch/measure_code_pair.py TABLE`, on a CPU, in float32. Unless it
states otherwise: greedy, the {prompts} held-out prompts of `prompts.json` (at most {prompt_tokens}
tokens, whole lines), {new_tokens} new tokens each; acceptance length in tokens per verify step,
bonus included. "Loops" are steps in a tail that repeats a period of at most 40 tokens at least
three times; in loops any drafter looks good. "Lookup" drafts what followed the last earlier
occurrence of the last 3 (2, 1) tokens, on the same answers.

## Acceptance length (`acceptance`)

{acceptance}

## Share of the steps that accept at least k drafted tokens (`positions`)

{positions}

## Block size at which the draft runs (`blocks`)

{blocks}

## Context window of the draft (`windows`)

{long_prompts} held-out prompts of {long_prompt_tokens} tokens. The draft learned on texts of
{window} tokens; farther context confuses it, so its checkpoint has a window of as many in every
layer, which this table leaves out.

{windows}

## Temperature (`temperature`)

Temperature 1 with seed {seed}.

{temperature}

## Without the target's hidden states (`ablation`)

With its context K/V zeroed, the draft sees its own block only.

{ablation}

## The target's loss (`loss`)

{loss}

## While the draft learned

Acceptance length on the blocks that it is trained on (random places, running mean over some 20
steps). The learning rate falls during the second half of the planned steps; it rises again where a
run is continued with more.

{curve}

Made by `python launch/train_code_pair.py --work WORK --out launch/demo_models/code`.
"""
