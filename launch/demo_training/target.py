"""The demo targets: small Qwen3 and Qwen3.5, trained on the library, then on a few files."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from . import data
from .loop import train


def build_target(kind: str, tokenizer: Tokenizer) -> PreTrainedModel:
    """`dense`: 6 attention layers; `hybrid`: 8 layers, three GDN before each attention layer."""
    common = {
        "vocab_size": data.VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id(data.IM_END),
        "pad_token_id": tokenizer.token_to_id(data.END_OF_TEXT),
        "bos_token_id": None,
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=6, rope_theta=1000000.0, **common))
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}
    recurrent = {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    config = Qwen3_5TextConfig(
        num_hidden_layers=8, full_attention_interval=4, rope_parameters=rope, **recurrent, **common
    )
    # Published configurations have it, and SGLang reads it rather than `layer_types`.
    config.full_attention_interval = 4
    return Qwen3_5ForCausalLM(config)


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Mean cross entropy in nats and the argmax accuracy over `ids` `[B, L]`."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    labels = ids[:, 1:].flatten()
    return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean().item()


def train_target(
    kind: str,
    corpus: data.Corpus,
    tokenizer: Tokenizer,
    work: Path,
    steps: int,
    memorize_steps: int,
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build_target(kind, tokenizer)
    general = data.token_stream(tokenizer, corpus.general)
    memorized = data.token_stream(tokenizer, corpus.memorized)
    broad = data.WindowSampler(general, tokenizer, 256, chat_share=0.1)
    narrow = data.WindowSampler(memorized, tokenizer, 448, chat_share=0.2)

    def pretrain(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        loss, accuracy = next_token_loss(model, broad.sample(12, rng))
        return loss, {"accuracy": accuracy}

    def memorize(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        # Some general text in every batch, so that the model remains a language model.
        loss, accuracy = next_token_loss(model, narrow.sample(6, rng))
        general_loss, _ = next_token_loss(model, broad.sample(2, rng))
        return 0.85 * loss + 0.15 * general_loss, {"memorized": loss.item(), "accuracy": accuracy}

    train("target", model, pretrain, steps=steps, lr=6e-3, work=work)
    # The name seeds the data, and so is part of the published weights.
    train("memorise", model, memorize, steps=memorize_steps, lr=4e-3, work=work)
    return model.eval()


def save_target(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the target as a bfloat16 Hugging Face checkpoint with tokenizer and chat template."""
    model.to(torch.bfloat16).save_pretrained(folder)
    ends = [tokenizer.token_to_id(data.IM_END), tokenizer.token_to_id(data.END_OF_TEXT)]
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False).save_pretrained(
        folder
    )
    data.save_tokenizer(tokenizer, folder)


def load_target(folder: Path) -> PreTrainedModel:
    """The saved target in float32, frozen."""
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )
