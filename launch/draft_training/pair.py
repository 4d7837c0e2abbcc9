"""The pair: a target that learns library code in general and memorizes no file, and a draft
that learns from the target's own continuations. One function per stage; each resumes if it is cut,
and returns at once if its result is there."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model, save_model
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.fields import read_json_object

from . import data
from .continuations import WINDOW as CONTEXT
from .continuations import Shard, read_shard, write_shards
from .draft import dflash2_config, draft_config, init_from_draft, init_from_target, train_draft
from .loop import train
from .target import build_target, load_target, next_token_loss, save_target
from .unloop import COURSES, train_unloop

WINDOW = 448
BATCH = 7


def make_tokenizer(split: data.Split, work: Path) -> Tokenizer:
    """Trained on the training files."""
    file = work / "tokenizer.json"
    if not file.exists():
        texts = [split.train[name] for name in sorted(split.train)]
        data.train_bpe(texts, data.VOCAB_SIZE).save(str(file))
    return Tokenizer.from_file(str(file))


def make_target(split: data.Split, tokenizer: Tokenizer, work: Path, out: Path, steps: int) -> None:
    """Train the target on windows of the training files, then against its own loops."""
    if (out / "target").exists():
        return
    torch.manual_seed(0)
    model = build_target(tokenizer)
    stream = data.token_stream(tokenizer, split.train)
    windows = data.WindowSampler(stream, tokenizer, WINDOW, chat_share=0.1)

    def loss_of(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        loss, accuracy = next_token_loss(model, windows.sample(BATCH, rng))
        return loss, {"accuracy": accuracy}

    train("target", model, loss_of, steps=steps, lr=5e-3, work=work)
    train_unloop(model, windows, work)
    save_target(model, tokenizer, out / "target")


def make_continuations(
    split: data.Split, tokenizer: Tokenizer, work: Path, out: Path, shards: int
) -> None:
    """Let the saved target, as it is served, continue prompts of the training files.

    Raises:
        ValueError: the continuations under `work` are those of another target.
    """
    digest = hashlib.sha256((out / "target" / "model.safetensors").read_bytes()).hexdigest()
    folder = work / "continuations"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "target.sha256"
    if not file.exists():
        file.write_text(digest)
    if file.read_text() != digest:
        raise ValueError(
            f"{folder}: written by another target than {out / 'target'}; "
            "delete the folder and draft.state.pt beside it, or give another --work"
        )
    target = load_target(out / "target")
    layers = draft_config(target, tokenizer)["dflash_config"]["target_layer_ids"]
    ends = [tokenizer.token_to_id(name) for name in (data.IM_END, data.END_OF_TEXT)]
    stream = data.token_stream(tokenizer, split.train)
    write_shards(target, layers, stream, ends, folder, shards)


def make_draft(tokenizer: Tokenizer, work: Path, out: Path, steps: int) -> None:
    """Train the draft on the continuations."""
    if (out / "draft").exists():
        return
    target = load_target(out / "target")
    raw = draft_config(target, tokenizer)
    # It never sees more context than a continuation has. Further away, it would read noise.
    sliding = {"layer_types": ["sliding_attention"] * raw["num_hidden_layers"]}
    raw |= {**sliding, "sliding_window": CONTEXT, "is_causal": False}
    torch.manual_seed(1)
    model = DraftModel(DraftConfig.from_dict(raw))
    init_from_target(model, target)
    embed = target.get_input_embeddings().weight.detach()
    train_draft(model, embed, shards_of(work), work, steps)
    save_model(model, raw, out / "draft", torch.bfloat16)


def make_dflash2(work: Path, out: Path, steps: int) -> None:
    """Train the DFlash2 draft on the same continuations, from the v1 draft on."""
    if (out / "dflash2").exists():
        return
    target, raw = load_target(out / "target"), read_json_object(out / "draft" / "config.json", "")
    raw = dflash2_config(raw)
    torch.manual_seed(2)
    model = DraftModel(DraftConfig.from_dict(raw))
    init_from_draft(model, load_model(out / "draft", dtype=torch.float32))
    train_draft(model, target.get_input_embeddings().weight.detach(), shards_of(work), work, steps)
    save_model(model, raw, out / "dflash2", torch.bfloat16)


def shards_of(work: Path) -> list[Shard]:
    return [read_shard(file) for file in sorted((work / "continuations").glob("*.pt"))]


def cpu_seconds(work: Path) -> dict[str, float]:
    """CPU seconds of every stage so far, interruptions included."""
    spent = {
        name: torch.load(work / f"{name}.state.pt", mmap=True)["spent"]
        for name in ("target", *(course.name for course in COURSES), "draft", "dflash2")
        if (work / f"{name}.state.pt").exists()
    }
    shards = sorted((work / "continuations").glob("*.pt"))
    if shards:
        spent["continuations"] = sum(torch.load(file, mmap=True)["spent"] for file in shards)
    return spent
