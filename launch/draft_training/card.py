"""The best draft and its card, which describes the training text and has the learning curve."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig

from . import draft, text
from .recipe import HELD_OUT, HELD_OUT_TOKENS, Recipe
from .states import read_text


def write(recipe: Recipe, name: str, out: Path) -> None:
    """Copy the best milestone of the run `name` into `out`, and write its README.md and
    curve.json."""
    if not (recipe.work / f"{name}.curve.json").exists():
        raise ValueError(f"{recipe.work}: no milestone of {name} yet; run the stage {name} first")
    step, best = best_milestone(recipe, name)
    out.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(best / file, out / file)
    curve = json.loads((recipe.work / f"{name}.curve.json").read_text())
    (out / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    config = DraftConfig.from_pretrained(out)
    facts = _facts(recipe, config, out)
    (out / "README.md").write_text(_CARD.format(**facts, step=step, curve=_table(curve)))


def best_milestone(recipe: Recipe, name: str) -> tuple[int, Path]:
    """Return step and folder of the milestone with the highest mean acceptance length over the
    held-out sets, the later one of equals."""
    before = recipe.curve_before()[-1:] if name == "draft" else []
    steps_before = before[0]["step"] if before else 0
    measured = []
    for row in json.loads((recipe.work / f"{name}.curve.json").read_text()):
        folder = recipe.work / "milestones" / f"{name}-{row['step'] - steps_before:06}"
        if row["step"] > steps_before and folder.exists():
            lengths = row["held_out"].values()
            measured.append((sum(lengths) / max(1, len(lengths)), row["step"], folder))
    return max(measured)[1:]


def _table(curve: list[dict[str, Any]]) -> str:
    names = list(curve[-1]["held_out"])
    head = ["steps", "on", "seconds", "blocks", "in training", *names]
    lines = [head, ["---"] * len(head)]
    for row in curve:
        held_out = [f"{row['held_out'].get(name, float('nan')):.2f}" for name in names]
        step, seconds, blocks = (f"{row[column]:,}" for column in ("step", "seconds", "blocks"))
        lines.append([step, row["device"], seconds, blocks, f"{row['in_batches']:.2f}", *held_out])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(recipe: Recipe, config: DraftConfig, out: Path) -> dict[str, Any]:
    rows = [
        row for file in sorted((recipe.work / "text").glob("*.jsonl")) for row in read_text(file)
    ]
    kinds = Counter(row["kind"] for row in rows)
    tokens = sum(end - begin for row in rows for begin, end in row["answers"])
    return {
        "target": recipe.target_folder.name,
        "kind": config.head.description,
        "block": config.block_size,
        "depth": config.num_hidden_layers,
        "features": ", ".join(map(str, config.target_layer_ids)),
        "window": config.layers[0].sliding_window,
        "bytes": (out / "model.safetensors").stat().st_size,
        "chats": len(rows),
        "kinds": ", ".join(f"{count} {source}" for source, count in sorted(kinds.items())),
        "tokens": tokens,
        "sampled": sum(row["sampled"] for row in rows) / max(1, len(rows)),
        "text_seconds": _seconds_of(recipe.work / "text"),
        "states_seconds": _seconds_of(recipe.work / "states"),
        "temperature": text.ANSWERS.temperature,
        "near": text.NEAR_COPY,
        "loop": text.LOOP_TOKENS,
        "decay": draft.DECAY,
        "started": "".join(_STARTED.format(row["step"]) for row in recipe.curve_before()[-1:]),
        "held_out": ", ".join(f"{name} ({len(p)})" for name, p in recipe.held_out.items()),
        "new_tokens": HELD_OUT_TOKENS,
        "measured": HELD_OUT,
    }


def _seconds_of(folder: Path) -> float:
    """Return the seconds that all shards in a folder took."""
    heads = [json.loads(file.open().readline()) for file in sorted(folder.glob("*.jsonl"))]
    states = [
        torch.load(file, mmap=True, map_location="cpu") for file in sorted(folder.glob("*.pt"))
    ]
    return sum(header["spent"] for header in (*heads, *states))


_STARTED = """
The first {} steps were a run before, on other text that the target had written.
"""
_CARD = """# A {kind} draft for {target}

Block {block}, {depth} layers of the target's shape that read its layers {features} and the last
{window} tokens; {bytes:,} bytes in bfloat16. It borrows the target's embedding and lm_head.

- **Text**: {chats:,} chats ({kinds}), {tokens:,} tokens of answers, all written by the target:
  {sampled:.0%} of the answers sampled at temperature {temperature}, the others greedy; a loop is
  cut after {loop} tokens. {text_seconds:,.0f} seconds, and {states_seconds:,.0f} for hidden states.
- **Never seen**: {held_out}. A text that shares {near} words in a row with one of these prompts is
  left out.
- **Loss**: of blocks at random places of the answers, position weights
  exp(-(k - 1) / {decay:g}), half cross entropy of the target's greedy token, half that of its
  likeliest tokens.

Acceptance length in tokens per verify step, bonus included, greedy, outside repetition loops, on up
to {measured} prompts of each held-out set, {new_tokens} new tokens at most, while the draft learned
("in training": on the blocks that it is trained on; all others are of averaged weights):

{curve}

This draft is that after {step:,} steps, the best on the mean of the held-out sets.
{started}
Made by `python launch/train_draft.py --target TARGET --work WORK --out DRAFT`.
"""
